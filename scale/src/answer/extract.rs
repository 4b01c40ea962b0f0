//! The answer in the text of a solution.

/// Words before the answer of a solution. The last one in a text counts.
const ANNOUNCEMENTS: [&str; 4] = ["####", "answer is", "answer:", "answer :"];

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
    if let Some(formula) = formula(line) {
        return Some(formula.to_owned());
    }
    // In a sentence it is the first number, or the result if the sentence is a calculation; in anything else the rest of
    // the line.
    let amounts = line
        .split('$')
        .skip(1)
        .filter(|rest| begins_with_digit(rest));
    let is_sentence = line.split_whitespace().count() > 3 || amounts.count() > 1;
    let right = line.rsplit_once('=');
    let right = right.filter(|(left, _)| is_calculation(left));
    let number = (right.and_then(|(_, right)| first_number(right))).or_else(|| first_number(line));
    let number = number.map(str::to_owned);
    let whole = || line.trim_end_matches(['.', '*', ' ']).to_owned();
    let found = if is_sentence { number } else { Some(whole()) };
    found.filter(|found| !found.is_empty())
}

/// Returns `true` if what stands before the last sign of equality is a part of a calculation, and no remark on its first
/// number as in "5 (x = 3)".
fn is_calculation(left: &str) -> bool {
    let has_words = left.contains(|c: char| c.is_alphabetic());
    let is_remark = has_words && left.contains(['(', ',', ';']);
    !is_remark && !left.ends_with(['!', '<', '>'])
}

fn begins_with_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

/// Returns the first formula of a line. What is between the signs of two amounts of money is none.
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

/// Iterates over the numbers of a text: digits with a sign, separators, a fraction bar and a percent
/// sign. A sign after a letter, a digit or a bracket is an operator.
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
        // "-$5" keeps its sign, and ".5" its point.
        let has_point = text[..start].ends_with('.') && !before.ends_with(char::is_alphanumeric);
        let first = match is_negative {
            true => before.len() - 1,
            false => start - usize::from(has_point),
        };
        from = end;
        Some(&text[first..end])
    })
}
