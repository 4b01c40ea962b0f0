//! Normalizes the notation of an answer: many texts mean the same answer.

/// Removes parts without meaning: the signs around a formula, spaces and sizes of brackets.
pub fn clean(text: &str) -> String {
    // Stars around an answer are bold type; between numbers they are a power.
    let text = text.trim().trim_matches('*').trim_end_matches('.').trim();
    let mut text = text.replace("\\\\", "⏎").replace("\\! ", "\\!");
    for word in [
        "\\left",
        "\\right",
        "\\displaystyle",
        "\\big",
        "\\Big",
        "\\!",
        "\\;",
        "\\:",
        "\\,",
    ] {
        // The space commands separate thousands, too.
        text = remove_command(&text, word);
    }
    for (old, new) in [
        ("{,}", ""),
        ("\\$", ""),
        ("\\(", ""),
        ("\\)", ""),
        ("\\[", ""),
        ("\\]", ""),
        ("$", ""),
        ("dfrac", "frac"),
        ("tfrac", "frac"),
        ("\\%", "%"),
        ("\\{", "⦃"),
        ("\\}", "⦄"),
        ("\\lbrace", "⦃"),
        ("\\rbrace", "⦄"),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\degree", ""),
        ("°", ""),
        ("€", ""),
        ("£", ""),
        ("−", "-"),
        ("–", "-"),
        ("×", "*"),
        ("÷", "/"),
        ("π", "\\pi "),
        ("√", "\\sqrt "),
        ("~", " "),
        ("\\ ", " "),
        ("\\text{ and }", ","),
        ("\\text{ or }", ","),
        (" and ", ","),
        (" or ", ","),
        ("\\leq", "\\le"),
        ("\\geq", "\\ge"),
        ("\\le", "≤"),
        ("\\ge", "≥"),
    ] {
        text = text.replace(old, new);
    }
    let text = text.trim().trim_end_matches(['.', ',']).trim();
    // Commands that only set words, and the letter of a choice.
    let words = text
        .strip_prefix("\\text{")
        .and_then(|rest| rest.strip_suffix('}'));
    let words = words
        .filter(|words| !words.contains(['{', '}']))
        .unwrap_or(text);
    let letter = words
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'));
    let letter = letter.filter(|letter| letter.len() == 1 && letter.is_ascii());
    letter.unwrap_or(words).trim().to_owned()
}

/// Removes a command, but not a longer one that begins like it, as `\left` begins `\leftarrow`.
fn remove_command(text: &str, command: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(command) {
        let after = &rest[at + command.len()..];
        let is_longer = command.ends_with(char::is_alphabetic)
            && after.starts_with(|c: char| c.is_ascii_alphabetic());
        out += &rest[..if is_longer { at + command.len() } else { at }];
        rest = after;
    }
    out + rest
}
