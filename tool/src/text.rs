//! Text for the terminal. The contents of files, paths and variables are foreign: they may not move
//! the cursor, change colours or look like a line that the tool writes. The tool's own colours
//! reach terminals only, and none if `NO_COLOR` is set.

use std::fmt::{Display, Write as _};
use std::io::{self, ErrorKind, Write as _};

use anstyle::{AnsiColor, Style};
use comfy_table::{CellAlignment, Row, Table, presets};
use serde::Serialize;

use crate::ToolError;

/// Returns `true` for characters that a terminal obeys rather than shows: controls, line
/// separators, and those that change the direction of the text.
// SOURCE: Unicode 16, general category Cc, the two separators, and Bidi_Control.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Formats foreign text for one line: characters that a terminal obeys are escaped as in `\u{1b}`.
pub fn escaped(text: impl Display) -> String {
    let mut out = String::new();
    for c in text.to_string().chars() {
        match is_obeyed(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// Names of columns and devices.
const HEADING: Style = Style::new().bold();
/// Results of tests, and failures.
const PASSED: Style = AnsiColor::Green.on_default();
const FAILED: Style = AnsiColor::Red.on_default().bold();

/// Marks text as a heading.
pub fn heading(text: impl Display) -> String {
    format!("{HEADING}{text}{HEADING:#}")
}

/// Marks text as good or bad news.
pub fn verdict(is_good: bool, text: impl Display) -> String {
    let style = if is_good { PASSED } else { FAILED };
    format!("{style}{text}{style:#}")
}

/// A column of a table: its name, and the alignment of its cells.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Text, on the left.
    Text(&'static str),
    /// Numbers, on the right.
    Number(&'static str),
}

/// Formats a table without borders: a line of names, then a line for each row.
///
/// - `rows`: as many cells each as there are columns; foreign text in them was passed through
///   [`escaped`]
pub fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let names = columns.iter().map(|column| match column {
        Column::Text(name) | Column::Number(name) => *name,
    });
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(names);
    table.add_rows(rows.into_iter().map(Row::from));
    for (cells, column) in table.column_iter_mut().zip(columns) {
        cells.set_padding((0, 2));
        cells.set_cell_alignment(match column {
            Column::Text(_) => CellAlignment::Left,
            Column::Number(_) => CellAlignment::Right,
        });
    }
    let text = table.trim_fmt() + "\n";
    let (names, rows) = text.split_at(text.find('\n').unwrap_or(text.len()));
    heading(names) + rows
}

/// Number of characters shown from the beginning and from the end of a long line, because a parser
/// may repeat a text of a megabyte.
const SAID: [usize; 2] = [2000, 500];

fn shortened(line: String) -> String {
    let count = line.chars().count();
    if count <= SAID[0] + SAID[1] {
        return line;
    }
    let begin: String = line.chars().take(SAID[0]).collect();
    let end: String = line.chars().skip(count - SAID[1]).collect();
    format!("{begin} … {end}")
}

/// Writes a line to standard error.
pub fn say(line: impl Display) {
    // A closed standard error must not make the command fail.
    let _ = writeln!(io::stderr().lock(), "{}", shortened(escaped(line)));
}

/// Writes the reason of a failure to standard error.
pub fn fail(reason: impl Display) {
    let line = shortened(escaped(reason));
    let _ = writeln!(anstream::stderr(), "{} {line}", verdict(false, "ggml-npu:"));
}

/// Writes to standard output. A reader that stops early, such as `head`, is not an error.
///
/// - `text`: lines; foreign text in them was passed through [`escaped`]
///
/// # Errors
/// An error of the system, other than a closed pipe.
pub fn print(text: &str) -> Result<(), ToolError> {
    match anstream::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Writes a report to standard output as JSON, whose strings are exact: characters that a terminal
/// obeys are escaped as JSON has it.
///
/// # Errors
/// As [`print()`].
pub fn print_json(report: &impl Serialize) -> Result<(), ToolError> {
    let json = serde_json::to_string_pretty(report)?;
    let mut out = String::with_capacity(json.len() + 1);
    for c in json.chars() {
        // Line feeds are between values only, because serde_json escapes those in strings.
        match c != '\n' && is_obeyed(c) {
            true => write!(out, "\\u{:04x}", u32::from(c))?,
            false => out.push(c),
        }
    }
    out.push('\n');
    print(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_table_are_aligned_whatever_the_width_of_a_character() {
        let columns = [Column::Text("name"), Column::Number("M"), Column::Text("")];
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let text = table(&columns, [row(["漢字", "512", "x"]), row(["a", "1", ""])]);
        let text = anstream::adapter::strip_str(&text).to_string();
        assert_eq!(text, "name    M\n漢字  512  x\na       1\n");
    }

    #[test]
    fn a_long_line_has_its_beginning_and_its_end() {
        let line = |middle: usize| format!("file: {}: line 1", "é".repeat(middle));
        assert_eq!(shortened(line(2486)), line(2486), "2500 characters");
        let short = shortened(line(1 << 20));
        assert_eq!(short.chars().count(), 2503);
        assert!(short.starts_with("file: é") && short.contains("é … é"));
        assert!(short.ends_with("é: line 1"));
    }

    #[test]
    fn what_a_terminal_obeys_is_escaped_and_the_rest_stays() {
        let text = "größe 漢 \u{1b}[31m\r\n\u{9b}2J\u{7f}\u{202e}\u{2028}\u{0}\\";
        let want = "größe 漢 \\u{1b}[31m\\r\\n\\u{9b}2J\\u{7f}\\u{202e}\\u{2028}\\u{0}\\";
        assert_eq!(escaped(text), want);
    }
}
