//! The answer in the text of a solution.

use super::is_name;

/// Words before the answer of a solution. The last one in a text counts.
const ANNOUNCEMENTS: [&str; 4] = ["####", "answer is", "answer:", "answer :"];

/// Signs and words between the two numbers of a calculation.
const OPERATORS: [&str; 18] = [
    "+", "-", "−", "*", "/", "^", "×", "÷", "·", "\\times", "\\cdot", "\\div", " x ", " of ",
    " times ", " plus ", " minus ", " by ",
];
/// Functions of numbers, which are calculations without an operator.
const FUNCTIONS: [&str; 3] = ["\\frac", "\\sqrt", "√"];

/// Equals signs of a line that are considered as part of a calculation, counted from its end.
const MAX_EQUALITIES: usize = 8;

/// Words after which a text is a remark on the calculation, not part of it.
const REMARKS: [&str; 6] = ["because", "if", "since", "when", "where", "while"];

/// Finds the final answer: in the last `\boxed{}`, or else after the last announcement, or else the
/// last number of the text.
#[must_use]
pub fn extract(text: &str) -> Option<String> {
    boxed(text)
        .or_else(|| announced(text))
        .or_else(|| last_number(text))
}

fn boxed(text: &str) -> Option<String> {
    let starts = ["\\boxed{", "\\fbox{"].map(|start| text.rfind(start).map(|at| at + start.len()));
    let start = starts.into_iter().flatten().max()?;
    let mut depth = 1;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            let inner = text[start..start + at].trim();
            return (!inner.is_empty()).then(|| inner.to_owned());
        }
    }
    None
}

fn announced(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let ends = ANNOUNCEMENTS.map(|word| lower.rfind(word).map(|at| at + word.len()));
    let rest = text[ends.into_iter().flatten().max()?..].trim_start_matches([' ', ':', '*', '\n']);
    let line = rest.lines().next()?.trim();
    let sentence = first_sentence(line);
    if let Some(formula) = formula(sentence) {
        return Some(formula.to_owned());
    }
    // In a sentence the answer is the first number, or the result if the sentence is a calculation.
    // Otherwise it is the rest of the line.
    let amounts = sentence
        .split('$')
        .skip(1)
        .filter(|rest| begins_with_digit(rest));
    // If another sentence follows, this one is a sentence even if it is short.
    let most_words = if sentence.len() < line.len() { 1 } else { 3 };
    let is_sentence = sentence.split_whitespace().count() > most_words || amounts.count() > 1;
    let value = defined(sentence);
    let number = || result(value).or_else(|| first_number(value));
    let found = if is_sentence {
        number()
    } else {
        Some(sentence.trim_end_matches(['.', '*', ' ']))
    };
    (found.filter(|found| !found.is_empty())).map(str::to_owned)
}

/// Returns the part of a line before the first full stop or colon that ends a sentence with a
/// number. The full stop of an abbreviation ("3 lb. + 4 lb.") and the colon of a ratio do not end a
/// sentence.
fn first_sentence(line: &str) -> &str {
    let is_end = |at: usize, mark: &str| {
        let (head, rest) = (&line[..at], line[at + mark.len()..].trim_start());
        // Two stars are bold type here, not an operator.
        let rest = rest.trim_start_matches("**");
        let goes_on = match mark {
            ". " => rest.starts_with(char::is_lowercase),
            _ => begins_with_digit(rest),
        };
        let is_operator =
            rest.starts_with('=') || OPERATORS.iter().any(|sign| rest.starts_with(sign));
        head.contains(|c: char| c.is_ascii_digit()) && !goes_on && !is_operator && is_closed(head)
    };
    let ends = [". ", ": "].map(|mark| {
        let mut marks = line.match_indices(mark);
        marks.find(|(at, _)| is_end(*at, mark)).map(|(at, _)| at)
    });
    let end = ends.into_iter().flatten().min();
    end.map_or(line, |end| &line[..end])
}

/// Returns `true` if a text ends outside of brackets and formulas.
fn is_closed(text: &str) -> bool {
    let count = |what: &[char]| text.matches(what).count();
    count(&['$']).is_multiple_of(2) && count(&['(', '[', '{']) <= count(&[')', ']', '}'])
}

/// Returns the right side of a definition, as "f(3) = 9", and all of another text.
fn defined(text: &str) -> &str {
    let is_digit = |c: char| c.is_ascii_digit();
    match text.split_once('=') {
        Some((name, value)) if is_name(name.trim().trim_end_matches(is_digit)) => value,
        _ => text,
    }
}

/// Returns the first number after the last equals sign of a calculation. A remark may follow it, as
/// in "3 + 4 = 7 when x = 2".
fn result(text: &str) -> Option<&str> {
    let mut signs = text.rmatch_indices('=').take(MAX_EQUALITIES);
    let at = signs.find(|(at, _)| is_calculation(&text[..*at]))?.0;
    first_number(&text[at + 1..])
}

/// Returns `true` if the text before an equals sign is a calculation, and not a remark on a number,
/// as in "5 (x = 3)" or "10 when x = 2".
fn is_calculation(left: &str) -> bool {
    let left = left.to_ascii_lowercase();
    let has_words = left.contains(char::is_alphabetic);
    let mut words = left.split(|c: char| !c.is_alphabetic());
    let is_remark =
        has_words && (left.contains(['(', ',', ';']) || words.any(|word| REMARKS.contains(&word)));
    !is_remark && !left.ends_with(['!', '<', '>']) && !ends_with_name(&left) && has_operation(&left)
}

/// Returns `true` if a text ends with a name after a word, as "at x". A unit is after a number, as
/// "4 m".
fn ends_with_name(text: &str) -> bool {
    let mut words = text.split_whitespace().rev();
    let (last, before) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let mut name = last.trim_start_matches(['$', '*', '\\']).chars();
    let is_name = name.next().is_some_and(char::is_alphabetic)
        && (last.contains('\\') || !name.next().is_some_and(char::is_alphabetic));
    is_name && before.starts_with(char::is_alphabetic)
}

/// Returns `true` if a lower-case text has an operator between two numbers, a fraction or a root.
fn has_operation(text: &str) -> bool {
    let first = text.find(|c: char| c.is_ascii_digit());
    let is_between = |(at, sign): (usize, &str)| {
        let right =
            text[at + sign.len()..].trim_start_matches([' ', '$', '\\', '(', '{', '-', '.']);
        first.is_some_and(|first| first < at) && begins_with_digit(right)
    };
    OPERATORS
        .iter()
        .any(|sign| text.match_indices(sign).any(is_between))
        || FUNCTIONS.iter().any(|name| text.contains(name))
}

fn begins_with_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// Returns the first formula of a line. Text between the dollar signs of two amounts of money does
/// not count.
fn formula(line: &str) -> Option<&str> {
    for (open, close) in [("\\(", "\\)"), ("\\[", "\\]"), ("$", "$")] {
        if let Some((_, rest)) = line.split_once(open)
            && let Some((inner, after)) = rest.split_once(close)
            && !inner.trim().is_empty()
            && (open != "$" || !begins_with_digit(after) && is_formula(inner.trim()))
        {
            return Some(inner.trim());
        }
    }
    None
}

/// Returns `true` if a text does not end with an operator, and has no words outside of braces.
fn is_formula(text: &str) -> bool {
    let mut depth = 0_i32;
    let mut outside = text.to_owned();
    outside.retain(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth <= 0
    });
    let is_word = |word: &str| word.len() > 2 && word.bytes().all(|c| c.is_ascii_alphabetic());
    let mut words = outside.split_whitespace();
    !text.ends_with(['+', '-', '*', '/', '=', '<', '>'])
        && !words.any(|word| is_word(word.trim_matches([',', '.', ';', ':'])))
}

fn first_number(text: &str) -> Option<&str> {
    numbers(text).next()
}

fn last_number(text: &str) -> Option<String> {
    numbers(text).last().map(str::to_owned)
}

/// Iterates over the numbers of a text: digits with a sign, separators, a fraction bar and a
/// percent sign. A sign after a letter, a digit or a bracket is an operator.
fn numbers(text: &str) -> impl Iterator<Item = &str> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + text[from..].find(|c: char| c.is_ascii_digit())?;
        let bytes = text.as_bytes();
        let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
        let mut end = start;
        while is_digit(end)
            || matches!(bytes.get(end), Some(b'.' | b',' | b'/')) && is_digit(end + 1)
        {
            end += 1;
        }
        if bytes.get(end) == Some(&b'%') {
            end += 1;
        }
        let before = text[..start].trim_end_matches(['$', '.']);
        let sign = before.strip_suffix('-');
        let is_negative =
            sign.is_some_and(|rest| !rest.ends_with(|c: char| c.is_alphanumeric() || c == ')'));
        // "-$5" keeps its minus sign, and ".5" its decimal point.
        let has_point = text[..start].ends_with('.') && !before.ends_with(char::is_alphanumeric);
        let first = match is_negative {
            true => before.len() - 1,
            false => start - usize::from(has_point),
        };
        from = end;
        Some(&text[first..end])
    })
}
