//! The answer in a text, and when two answers are the same.
//!
//! The rules are those that math-verify documents, without a computer algebra system: an expression
//! is evaluated, with fixed numbers for its letters, so that two forms of the same expression have
//! the same values. Not covered: solving equations, unions of sets, and numbers in other bases,
//! which are compared as text.

mod expression;
mod extract;
mod normalize;
mod token;

use std::cell::Cell;

pub use self::extract::extract;

use self::expression::{POINTS, evaluate};
use self::normalize::clean;

/// Digits after the decimal point that are compared.
///
/// SOURCE: `float_rounding` of `math_verify.verify`, math-verify 0.9.0.
const DECIMALS: i32 = 6;

/// Relative difference below which exact expressions are the same number.
const EXACT: f64 = 1e-9;

/// The structure of an answer, whose parts are separated by commas outside of brackets.
#[derive(Clone, Debug)]
enum Structure {
    /// An expression: its values with different numbers for the letters.
    Quantity(Quantity),
    /// Parts in a fixed order, with the brackets around them.
    Ordered(char, char, Vec<Answer>),
    /// Parts in any order: a set.
    Unordered(Vec<Answer>),
    /// An equation or an inequality, as left side minus right side, which is zero, negative, or not
    /// positive.
    Relation(Sign, [f64; POINTS]),
    /// Anything else is compared as text.
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    Zero,
    Less,
    NotMore,
}

#[derive(Clone, Debug)]
struct Quantity {
    values: [f64; POINTS],
    /// An integer of any length, which a floating-point number may not represent exactly.
    integer: Option<i128>,
    /// Written with a decimal point.
    is_decimal: bool,
    is_percent: bool,
}

/// An answer, ready to be compared.
#[derive(Clone, Debug)]
pub struct Answer {
    form: Structure,
    text: String,
}

impl Answer {
    /// Reads an answer, in LaTeX or plain.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let parts_left = Cell::new(match text.len() {
            0..=MAX_BYTES => MAX_PARTS,
            _ => 0,
        });
        let answer = Self::inner(text, 0, &parts_left);
        match parts_left.get() {
            0 => Self {
                form: Structure::Text,
                ..answer
            },
            _ => answer,
        }
    }

    /// Reads an answer that is nested in `depth` others, and subtracts its parts from the number
    /// that is allowed.
    fn inner(text: &str, depth: usize, parts_left: &Cell<usize>) -> Self {
        let text = clean(text);
        parts_left.set(parts_left.get().saturating_sub(1));
        Self {
            form: match parts_left.get() {
                0 => Structure::Text,
                _ => form(&text, depth, parts_left),
            },
            text: text.to_lowercase().split_whitespace().collect(),
        }
    }

    /// Returns `true` if both are the same answer.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        if self.text == other.text {
            return true;
        }
        match (&self.form, &other.form) {
            (Structure::Quantity(a), Structure::Quantity(b)) => a.same(b),
            (Structure::Relation(sign, a), Structure::Relation(sign_b, b)) => {
                sign == sign_b && proportional(a, b, *sign == Sign::Zero)
            }
            (Structure::Unordered(a), Structure::Unordered(b)) => same_set(a, b),
            (Structure::Ordered(open, close, a), Structure::Ordered(open_b, close_b, b)) => {
                (open, close) == (open_b, close_b) && same_list(a, b)
            }
            // Without brackets a list was parsed as a set. A set of one element is equal to the
            // element.
            (Structure::Ordered('(', ')', a), Structure::Unordered(b))
            | (Structure::Unordered(b), Structure::Ordered('(', ')', a)) => same_list(a, b),
            (Structure::Unordered(set), Structure::Quantity(_)) => {
                set.len() == 1 && set[0].same(other)
            }
            (Structure::Quantity(_), Structure::Unordered(set)) => {
                set.len() == 1 && set[0].same(self)
            }
            _ => false,
        }
    }
}

impl Quantity {
    fn same(&self, other: &Self) -> bool {
        if let (Some(a), Some(b)) = (self.integer, other.integer) {
            return a == b;
        }
        let is_decimal = self.is_decimal || other.is_decimal;
        let close = |a: f64, b: f64| match is_decimal {
            true => round(a) == round(b),
            false => (a - b).abs() <= EXACT * a.abs().max(b.abs()).max(EXACT),
        };
        let same = |scale: f64| {
            let mut pairs = self.values.iter().zip(&other.values);
            pairs.all(|(a, b)| close(a * scale, *b))
        };
        // 9 may stand for 9 %, too.
        same(1.0)
            || (self.is_percent && !other.is_percent && same(100.0))
            || (other.is_percent && !self.is_percent && same(0.01))
    }
}

fn round(x: f64) -> f64 {
    let scale = 10_f64.powi(DECIMALS);
    (x * scale).round() / scale
}

fn same_list(a: &[Answer], b: &[Answer]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b))
}

fn same_set(a: &[Answer], b: &[Answer]) -> bool {
    // Each pair is compared once: comparing twice would double the work at each level of nesting.
    let mut found = vec![false; b.len()];
    let is_found = |x: &Answer| {
        let mut any = false;
        for (y, found) in b.iter().zip(&mut found) {
            let same = x.same(y);
            (any, *found) = (any | same, *found | same);
        }
        any
    };
    a.iter().all(is_found) && found.iter().all(|found| *found)
}

/// Returns `true` if one is the other times a positive number, or with `any` times any number: two
/// relations with the same solutions.
fn proportional(a: &[f64; POINTS], b: &[f64; POINTS], any: bool) -> bool {
    let ratio = a[0] / b[0];
    let mut pairs = a.iter().zip(b);
    ratio.is_finite()
        && (any || ratio > 0.0)
        && pairs.all(|(a, b)| (a - ratio * b).abs() <= EXACT * a.abs().max(EXACT))
}

/// Deepest nesting of lists and sets. Deeper ones are compared as text.
const MAX_DEPTH: usize = 20;

/// Longest answer that is not compared as text.
const MAX_BYTES: usize = 4096;

/// Most parts that all lists and sets of an answer may have together; otherwise it is compared as
/// text. The time for sets grows with the square of their parts, and each `\pm` doubles the parts
/// inside.
const MAX_PARTS: usize = 1024;

fn form(text: &str, depth: usize, parts_left: &Cell<usize>) -> Structure {
    if depth > MAX_DEPTH {
        return Structure::Text;
    }
    let parts = |inner: &str| {
        split(inner, ',')
            .iter()
            .map(|part| Answer::inner(part, depth + 1, parts_left))
            .collect()
    };
    if let Some(inner) = inside(text, '⦃', '⦄') {
        return Structure::Unordered(parts(inner));
    }
    for open in ['(', '['] {
        for close in [')', ']'] {
            if let Some(inner) = inside(text, open, close)
                && split(inner, ',').len() > 1
            {
                return Structure::Ordered(open, close, parts(inner));
            }
        }
    }
    if let Some(matrix) = matrix(text, depth, parts_left) {
        return matrix;
    }
    if !is_one_number(text) && split(text, ',').len() > 1 {
        return Structure::Unordered(parts(text));
    }
    if let Some((name, set)) = text.split_once("\\in")
        && is_name(name)
        && !set.starts_with(char::is_alphabetic)
    {
        return form(set.trim(), depth + 1, parts_left);
    }
    if text.contains("\\pm") {
        let signed = |sign| Answer::inner(&text.replace("\\pm", sign), depth + 1, parts_left);
        let signs = ["+", "-"].map(signed);
        return Structure::Unordered(signs.into());
    }
    for (sign, symbol, is_flipped) in INEQUALITIES {
        let sides = split(text, symbol);
        if let [left, right] = sides.as_slice() {
            let (left, right) = if is_flipped {
                (right, left)
            } else {
                (left, right)
            };
            let difference = difference(left, right);
            return difference.map_or(Structure::Text, |values| Structure::Relation(sign, values));
        }
    }
    let sides = split(text, '=');
    if let [left, right] = sides.as_slice() {
        // "x = 5" is the answer 5, and so is "f(x) = 5".
        if is_name(left) {
            return form(right.trim(), depth + 1, parts_left);
        }
        let difference = difference(left, right);
        return difference.map_or(Structure::Text, |values| {
            Structure::Relation(Sign::Zero, values)
        });
    }
    // The last side of a calculation is its result.
    if let [_, .., last] = sides.as_slice() {
        return form(last.trim(), depth + 1, parts_left);
    }
    number(text).map_or(Structure::Text, Structure::Quantity)
}

/// Symbols of inequalities; the flipped ones are read from right to left.
const INEQUALITIES: [(Sign, char, bool); 4] = [
    (Sign::Less, '<', false),
    (Sign::Less, '>', true),
    (Sign::NotMore, '≤', false),
    (Sign::NotMore, '≥', true),
];

fn difference(left: &str, right: &str) -> Option<[f64; POINTS]> {
    let (left, right) = (evaluate(left)?, evaluate(right)?);
    Some(std::array::from_fn(|i| left[i] - right[i]))
}

fn number(text: &str) -> Option<Quantity> {
    let (text, is_percent) = match strip_percent(text) {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let mut values = evaluate(text)?;
    if is_percent {
        values = values.map(|value| value / 100.0);
    }
    let digits: String = text.chars().filter(|c| !matches!(c, ',' | ' ')).collect();
    let is_integer = is_one_number(text) && !is_percent;
    Some(Quantity {
        values,
        integer: if is_integer {
            digits.parse().ok()
        } else {
            None
        },
        is_decimal: text.contains('.'),
        is_percent,
    })
}

fn strip_percent(text: &str) -> Option<&str> {
    let endings = ["%", "percent", "\\text{percent}", "\\text{ percent}"];
    endings
        .iter()
        .find_map(|end| text.strip_suffix(end))
        .map(str::trim)
}

/// Returns `true` for digits with separators of thousands, as 1,234,567.
fn is_one_number(text: &str) -> bool {
    let digits = text.trim().trim_start_matches('-');
    let (whole, decimals) = digits.split_once('.').unwrap_or((digits, ""));
    let is_digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    let mut groups = whole.split(',');
    let first = groups.next().unwrap_or_default();
    let rest: Vec<&str> = groups.collect();
    is_digits(first)
        && is_digits(decimals)
        && !first.is_empty()
        && (rest.is_empty() || first.len() <= 3)
        && rest
            .iter()
            .all(|group| group.len() == 3 && is_digits(group))
}

/// Returns `true` for the name of a variable or of a function.
fn is_name(text: &str) -> bool {
    let name = text.trim().trim_start_matches('\\');
    let name = name.split(['(', '_']).next().unwrap_or_default();
    (1..=5).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphabetic())
}

/// Returns the text between brackets, if they are a pair around all of it.
fn inside(text: &str, open: char, close: char) -> Option<&str> {
    let inner = text.strip_prefix(open)?.strip_suffix(close)?;
    let mut depth = 0_i32;
    for c in inner.chars() {
        match c {
            '(' | '[' | '{' | '⦃' => depth += 1,
            ')' | ']' | '}' | '⦄' => depth -= 1,
            _ => {}
        }
        if depth < 0 {
            return None;
        }
    }
    (depth == 0).then_some(inner)
}

/// Splits at the separators that are outside of brackets and not part of `<=`, `>=` or `!=`.
fn split(text: &str, separator: char) -> Vec<&str> {
    let (mut parts, mut depth, mut start, mut before) = (Vec::new(), 0_i32, 0, ' ');
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' | '⦃' => depth += 1,
            ')' | ']' | '}' | '⦄' => depth -= 1,
            c if c == separator && depth <= 0 && !matches!(before, '<' | '>' | '!') => {
                parts.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
        before = c;
    }
    parts.push(&text[start..]);
    parts
}

/// Reads a matrix or a vector, as a list of rows.
fn matrix(text: &str, depth: usize, parts_left: &Cell<usize>) -> Option<Structure> {
    let rest = text.strip_prefix("\\begin{")?;
    let (name, rest) = rest.split_once('}')?;
    let inner = rest.strip_suffix(&format!("\\end{{{name}}}"))?;
    if !name.ends_with("matrix") {
        return None;
    }
    let cell = |cell: &str| Answer::inner(cell, depth + 1, parts_left);
    let row = |row: &str| Answer {
        form: Structure::Ordered('[', ']', row.split('&').map(cell).collect()),
        text: row.split_whitespace().collect(),
    };
    let rows = inner.split('⏎').filter(|row| !row.trim().is_empty());
    Some(Structure::Ordered('m', 'm', rows.map(row).collect()))
}

#[cfg(test)]
mod tests;
