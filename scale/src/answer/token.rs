//! The parts of an expression, in LaTeX or plain.

/// A part of an expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    /// A number.
    Number(f64),
    /// A variable.
    Letter(char),
    /// A command without its backslash, or a function's name.
    Command(String),
    /// An operator or a bracket.
    Sign(char),
}

/// Names that are functions or constants, with a backslash or without.
const NAMES: [&str; 16] = [
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp",
    "sqrt", "pi", "frac", "infty",
];

/// Splits an expression; `None` if there is a character that no expression has.
pub fn tokens(text: &str) -> Option<Vec<Token>> {
    let chars: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        let word = |from: usize| {
            let letters = chars[from..].iter().take_while(|c| c.is_ascii_alphabetic());
            letters.collect::<String>()
        };
        match c {
            c if c.is_whitespace() => at += 1,
            c if c.is_ascii_digit() || c == '.' => {
                let (number, end) = digits(&chars, at)?;
                tokens.push(Token::Number(number));
                at = end;
            }
            '\\' => {
                let name = word(at + 1);
                if name.is_empty() {
                    return None;
                }
                at += 1 + name.len();
                match name.as_str() {
                    // A unit, or words next to the number.
                    "text" | "mbox" | "textrm" | "mathrm" | "textbf" => {
                        at = skip_group(&chars, at)?;
                        if tokens.is_empty() {
                            return None;
                        }
                        // cm^2
                        if chars.get(at) == Some(&'^') {
                            at = skip_power(&chars, at + 1);
                        }
                    }
                    "cdot" | "times" => tokens.push(Token::Sign('*')),
                    "div" => tokens.push(Token::Sign('/')),
                    "qquad" | "quad" => {}
                    _ => tokens.push(Token::Command(name)),
                }
            }
            c if c.is_ascii_alphabetic() => {
                let name = word(at);
                at += name.len();
                if NAMES.contains(&name.as_str()) {
                    tokens.push(Token::Command(name));
                } else if name.len() <= 2 || name.len() > 2 && is_product(&name) {
                    tokens.extend(name.chars().map(Token::Letter));
                } else if tokens.is_empty() {
                    return None;
                }
                // Any other word after an expression is a unit.
            }
            '+' | '-' | '*' | '/' | '^' | '(' | ')' | '{' | '}' | '!' | '[' | ']' | '|' => {
                tokens.push(Token::Sign(c));
                at += 1;
            }
            _ => return None,
        }
    }
    // Two letters directly after a number are a unit as well: 10 cm, 5 kg.
    if let [number @ .., Token::Letter(a), Token::Letter(b)] = tokens.as_slice()
        && matches!(
            number,
            [Token::Number(_)] | [Token::Sign('-'), Token::Number(_)]
        )
        && is_unit(&[*a, *b])
    {
        tokens.truncate(tokens.len() - 2);
    }
    (!tokens.is_empty()).then_some(tokens)
}

fn is_unit(letters: &[char; 2]) -> bool {
    let units = [
        "cm", "mm", "km", "kg", "mg", "ml", "mL", "ft", "in", "lb", "oz", "hr", "pm", "am",
    ];
    units.contains(&letters.iter().collect::<String>().as_str())
}

/// Returns `true` if a word is a product of the usual variables, as xyz.
fn is_product(word: &str) -> bool {
    word.len() <= 4
        && word
            .chars()
            .all(|c| matches!(c, 'x' | 'y' | 'z' | 'a' | 'b' | 'c' | 'n' | 'm'))
}

/// Reads digits with separators of thousands.
fn digits(chars: &[char], from: usize) -> Option<(f64, usize)> {
    let mut at = from;
    let mut text = String::new();
    let is_digit = |at: usize| chars.get(at).is_some_and(char::is_ascii_digit);
    while at < chars.len() {
        match chars[at] {
            c if c.is_ascii_digit() => text.push(c),
            ',' | ' '
                if (1..=3).all(|i| is_digit(at + i))
                    && !is_digit(at + 4)
                    && !text.contains('.') => {}
            '.' if !text.contains('.') && is_digit(at + 1) => text.push('.'),
            // 5. is 5
            '.' if !text.contains('.') && !text.is_empty() => {
                at += 1;
                break;
            }
            _ => break,
        }
        at += 1;
    }
    Some((text.parse().ok()?, at))
}

fn skip_group(chars: &[char], from: usize) -> Option<usize> {
    let mut depth = 0;
    for (index, c) in chars.iter().enumerate().skip(from) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            c if c.is_whitespace() && depth == 0 => {}
            _ if depth == 0 => return None,
            _ => {}
        }
        if depth == 0 && *c == '}' {
            return Some(index + 1);
        }
    }
    None
}

fn skip_power(chars: &[char], from: usize) -> usize {
    match chars.get(from) {
        Some('{') => skip_group(chars, from).unwrap_or(from),
        Some(_) => from + 1,
        None => from,
    }
}
