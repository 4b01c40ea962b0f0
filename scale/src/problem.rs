//! Problems, one in each line of a file, in the forms of the usual data sets.
//!
//! | fields | data set |
//! |---|---|
//! | `question`, `answer` | this project's own form, reasoning-gym, GSM8K (the answer is after `####`) |
//! | `problem`, `answer` | MATH-500 |
//! | `Body`, `Question`, `Answer` | SVAMP |
//! | `body`, `question`, `answer` | ASDiv (the unit, in brackets, is left out) |
//! | `input`, `target` | MAWPS |
//!
//! A problem's name is `id`, `unique_id`, `ID` or `idx`, or else the number of its line, from 1.

use std::collections::HashSet;
use std::path::Path;

use serde_json::{Map, Value};

use crate::Error;

/// A problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The problem's name in the file.
    pub id: String,
    /// The question.
    pub question: String,
    /// The right answer.
    pub answer: String,
}

impl Problem {
    /// Returns 16 hexadecimal digits that identify a question.
    // SOURCE: FNV-1a, 64 bits, Fowler, Noll and Vo.
    #[must_use]
    pub fn question_hash(&self) -> String {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in self.question.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        format!("{hash:016x}")
    }
}

/// Reads the problems of a file.
///
/// - `path`: the name in errors
/// - `text`: the whole file
///
/// # Errors
/// [`Error::Line`] for a line of unknown form, and for a name that occurs twice.
pub fn parse(path: &Path, text: &str) -> Result<Vec<Problem>, Error> {
    let mut names = HashSet::new();
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let failed = |reason: String| Error::Line {
            path: path.into(),
            line: index + 1,
            reason,
        };
        let object: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| failed(error.to_string()))?;
        let problem = problem(&object, index + 1).map_err(&failed)?;
        if !names.insert(problem.id.clone()) {
            return Err(failed(format!(
                "a second problem with the name {}",
                problem.id
            )));
        }
        problems.push(problem);
    }
    Ok(problems)
}

fn problem(object: &Map<String, Value>, line: usize) -> Result<Problem, String> {
    let field = |name: &str| {
        object
            .get(name)
            .map_or(Ok(None), |value| words(name, value))
    };
    let need = |name: &str| field(name)?.ok_or_else(|| format!("no field {name:?}"));
    let (question, answer) = if object.contains_key("Body") {
        let body = need("Body")?;
        let end = if body.trim().ends_with('.') { "" } else { "." };
        (
            format!("{}{end} {}", body.trim(), need("Question")?.trim()),
            need("Answer")?,
        )
    } else if object.contains_key("body") {
        let question = format!("{} {}", need("body")?.trim(), need("question")?.trim());
        let answer = need("answer")?;
        let unit = answer.find('(').unwrap_or(answer.len());
        (question, answer[..unit].to_owned())
    } else if object.contains_key("input") {
        (need("input")?, need("target")?)
    } else if object.contains_key("problem") {
        (need("problem")?, need("answer")?)
    } else {
        let answer = need("answer")?;
        let last = answer.rsplit("####").next().unwrap_or(&answer);
        (need("question")?, last.to_owned())
    };
    let ids = ["id", "unique_id", "ID", "idx"].map(field);
    let id = ids.into_iter().find_map(Result::transpose).transpose()?;
    Ok(Problem {
        id: id.unwrap_or_else(|| line.to_string()),
        question: question.trim().into(),
        answer: answer.trim().into(),
    })
}

/// Most digits of a decimal fraction for which a float of 64 bits is printed with the same digits.
const MOST_DIGITS: usize = 15;

/// Returns a text or a number as text: 18.0 is `18`.
///
/// # Errors
/// The name of a field with a number that may have been rounded when it was read: a fraction of
/// more than [`MOST_DIGITS`] digits, or a number with an exponent.
fn words(name: &str, value: &Value) -> Result<Option<String>, String> {
    Ok(match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => {
            let text = number.to_string();
            let digits = text.trim_start_matches(['-', '0', '.']);
            let digits = digits.bytes().filter(u8::is_ascii_digit).count();
            if text.contains('e') || number.is_f64() && digits > MOST_DIGITS {
                return Err(format!("field {name:?} is about {text}: write it as text"));
            }
            Some(text.strip_suffix(".0").map(str::to_owned).unwrap_or(text))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(number: &str) -> Result<String, Error> {
        let line = format!("{{\"question\": \"?\", \"answer\": {number}}}");
        parse(Path::new("problems.jsonl"), &line).map(|problems| problems[0].answer.clone())
    }

    #[test]
    fn a_number_is_its_digits_or_refused() {
        for (number, digits) in [
            ("18.0", "18"),
            ("18446744073709551615", "18446744073709551615"),
            ("-0.001", "-0.001"),
            ("0.123456789012345", "0.123456789012345"),
        ] {
            assert_eq!(answer(number).unwrap(), digits);
        }
        for number in [
            "15511210043330985984000000",
            "18446744073709551616",
            "1e-6",
            "0.000001",
            "9007199254740993.0",
            "0.1234567890123456789",
        ] {
            let error = answer(number).unwrap_err().to_string();
            assert!(
                error.contains("line 1: field \"answer\" is about"),
                "{error}"
            );
        }
        // A field that is not used may contain any number.
        let other = "{\"question\": \"?\", \"answer\": 1, \"level\": 1e-9}";
        assert!(parse(Path::new("problems.jsonl"), other).is_ok());
    }
}
