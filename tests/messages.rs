//! Proves that no message shows a value as Rust's `Debug` does: users do not understand `Some(60)`
//! or `Int8Unrotated`. Texts and lists of numbers may be shown so: [`SHOWN`].
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Folders of code whose messages users see.
const FOLDERS: [&str; 7] = [
    "src",
    "plugin/src",
    "hexagon-ops/src",
    "rknpu-ops/src",
    "sim-common/src",
    "task-pool/src",
    "tool/src",
];

/// Texts: quotes show where a text ends, and terminal commands in it are escaped.
const TEXT: &str = "text in quotes";
/// The form of a message with numbers in brackets, such as a shape.
const NUMBERS: &str = "a list of numbers";
/// No message.
const RECORD: &str = "a record of graphs, which a script reads";

/// Allowed placeholders: the file, the name in the placeholder (or nothing), and its kind.
const SHOWN: &[(&str, &str, &str)] = &[
    ("sim-common/src/lib.rs", "known", NUMBERS),
    ("src/config/rules.rs", "rule", TEXT),
    ("src/config/rules.rs", "word", TEXT),
    ("src/config/settings.rs", "", TEXT),
    ("src/error.rs", "have", TEXT),
    ("src/error.rs", "value", TEXT),
    ("src/ggml_version.rs", "version", TEXT),
    ("src/gguf/mod.rs", "name", TEXT),
    ("src/gguf/parse.rs", "", TEXT),
    ("src/gguf/parse.rs", "magic", NUMBERS),
    ("src/gguf/parse.rs", "name", TEXT),
    ("src/gguf/parse.rs", "ne", NUMBERS),
    ("src/hexagon/stream/record.rs", "", RECORD),
    ("src/hexagon/stream/record.rs", "dtype", RECORD),
    ("src/hexagon/stream/record.rs", "format", RECORD),
    (
        "src/gguf/write.rs",
        "",
        "text in quotes, and a list of numbers",
    ),
    ("src/packfile.rs", "name", TEXT),
    ("src/packfile/read.rs", "magic", NUMBERS),
    ("src/packfile/read.rs", "name", TEXT),
    ("src/packfile/read.rs", "ne", NUMBERS),
    ("src/packfile/take.rs", "", TEXT),
    ("src/packfile/write.rs", "name", TEXT),
    ("src/rockchip/discovery.rs", "", TEXT),
    ("src/rockchip/driver.rs", "have", NUMBERS),
    ("src/rockchip/driver.rs", "want", NUMBERS),
    ("tool/src/power.rs", "text", TEXT),
    ("tool/src/quantize/awq.rs", "have", NUMBERS),
    ("tool/src/quantize/awq.rs", "want", NUMBERS),
    ("tool/src/quantize/model.rs", "shape", NUMBERS),
    ("tool/src/quantize/recipe.rs", "name", TEXT),
    ("tool/src/quantize/recipe.rs", "pattern", TEXT),
];

/// Macros whose messages report faults of this project.
const OF_FAULTS: [&str; 8] = [
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "panic",
    "unreachable",
];

/// Returns the end of the text that begins with a quote at `start`.
fn end_of_text(code: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while code[at] != b'"' {
        at += if code[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// Returns the end of the raw text whose first `#` or quote is at `start`.
fn end_of_raw_text(code: &str, start: usize) -> usize {
    let marks = code[start..]
        .bytes()
        .take_while(|byte| *byte == b'#')
        .count();
    let end = format!("\"{}", "#".repeat(marks));
    let from = start + marks + 1;
    from + code[from..].find(&end).unwrap() + end.len()
}

/// Returns the end of the item of tests that begins at `start`: its last brace, or a semicolon.
fn end_of_item(code: &str, start: usize) -> usize {
    let mut depth = 0;
    let mut at = start;
    while at < code.len() {
        at = match code.as_bytes()[at] {
            b'{' => {
                depth += 1;
                at + 1
            }
            b'}' if depth == 1 => return at + 1,
            b'}' => {
                depth -= 1;
                at + 1
            }
            b';' if depth == 0 => return at + 1,
            _ => skip(code, at).unwrap_or(at + 1),
        };
    }
    at
}

/// Returns the end of the comment, text or character at `at`; `None` for other code.
fn skip(code: &str, at: usize) -> Option<usize> {
    let (bytes, rest) = (code.as_bytes(), &code[at..]);
    let is_in_name = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with("//") {
        Some(at + rest.find('\n').unwrap_or(rest.len()))
    } else if rest.starts_with("/*") {
        Some(at + rest.find("*/").unwrap() + 2)
    } else if rest.starts_with('"') {
        Some(end_of_text(bytes, at))
    } else if !is_in_name
        && ["r\"", "r#\"", "r##\""]
            .iter()
            .any(|raw| rest.starts_with(raw))
    {
        Some(end_of_raw_text(code, at + 1))
    } else if rest.starts_with("'\\") {
        Some(at + 3 + rest[3..].find('\'').unwrap() + 1)
    } else if rest.starts_with('\'') {
        let mut chars = rest.char_indices().skip(2);
        let (end, quote) = chars.next()?;
        // A closing quote makes it a character literal and not a lifetime.
        (quote == '\'').then_some(at + end + 1)
    } else {
        None
    }
}

/// Returns the name of the macro whose bracket is at `at`.
fn macro_at(code: &str, at: usize) -> &str {
    let before = code[..at].trim_end();
    let Some(before) = before.strip_suffix('!') else {
        return "";
    };
    let is_of_name = |c: char| c.is_alphanumeric() || c == '_';
    &before[before.trim_end_matches(is_of_name).len()..]
}

/// Returns the names in the placeholders of a text that show values as `Debug` does.
fn debug_placeholders(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find('{') {
        rest = &rest[start + 1..];
        if let Some(after) = rest.strip_prefix('{') {
            // An escaped brace is not a placeholder.
            rest = after;
        } else if let Some((inside, after)) = rest.split_once('}') {
            let form = inside
                .split_once(':')
                .filter(|(_, form)| form.ends_with('?'));
            found.extend(form.map(|(name, _)| name));
            rest = after;
        }
    }
    found
}

/// Returns line and name of each placeholder of Rust code that shows a value as `Debug` does, but
/// those of tests and of faults of ours.
fn shown(code: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut open = Vec::new();
    let mut at = 0;
    while at < code.len() {
        if code[at..].starts_with("#[cfg(test)]") {
            at = end_of_item(code, at);
            continue;
        }
        if let Some(end) = skip(code, at) {
            let is_text = !code[at..].starts_with('/') && !code[at..].starts_with('\'');
            if is_text && !open.iter().any(|name| OF_FAULTS.contains(name)) {
                let line = code[..at].matches('\n').count() + 1;
                let names = debug_placeholders(&code[at..end]).into_iter();
                found.extend(names.map(|name| (line, name)));
            }
            at = end;
            continue;
        }
        match code.as_bytes()[at] {
            b'(' | b'[' | b'{' => open.push(macro_at(code, at)),
            b')' | b']' | b'}' => {
                open.pop();
            }
            _ => {}
        }
        at += code[at..].chars().next().map_or(1, char::len_utf8);
    }
    found
}

/// Adds the files of code in a folder, without those of tests.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.file_stem().unwrap() == "tests" {
            continue;
        }
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[test]
fn no_message_shows_a_value_as_debug_does() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in FOLDERS {
        collect(&root.join(folder), &mut files);
    }
    assert!(files.len() > 300, "{} files", files.len());
    let (mut used, mut wrong) = (BTreeSet::new(), Vec::new());
    for file in files {
        let code = std::fs::read_to_string(&file).unwrap();
        let file = file.strip_prefix(root).unwrap().display().to_string();
        for (line, name) in shown(&code) {
            let is_it = |(of, known, _): &(&str, &str, &str)| (*of, *known) == (&*file, name);
            match SHOWN.iter().position(is_it) {
                Some(index) => {
                    used.insert(index);
                }
                None => wrong.push(format!("{file}:{line}: {{{name}:?}}")),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "messages show values as Debug does; give their types Display:\n{}",
        wrong.join("\n")
    );
    for (index, (file, name, what)) in SHOWN.iter().enumerate() {
        assert!(
            used.contains(&index),
            "{file} shows {what} as {{{name}:?}} no more"
        );
    }
}

#[test]
fn placeholders_are_found_in_messages_alone() {
    let code = r##"
        // {comment:?}
        fn shows<'a>(x: &'a str) -> char {
            log::info!("{x:?} and {{escaped:?}} {y}");
            assert!(x == 'y', "{fault:?}");
            let z = format!("{:#?} {name:>3?}", [1, unreachable!("{not:?}")]);
            '"'
        }
        #[error(r#"{field:?}"#)]
        #[cfg(test)]
        mod tests { fn f() { println!("{test:?} }"); } }
        #[error("{after:?}")]
    "##;
    let names: Vec<&str> = shown(code).into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["x", "", "name", "field", "after"]);
    assert_eq!(shown(code)[0].0, 4);
}
