//! The arithmetic of each weight: rules on tensor names, from `GGML_RUST_NPU_RULES`.
//!
//! `pattern=choice,pattern=choice,…`: patterns are regular expressions that may match anywhere in
//! the name, as in llama.cpp's `-ot`; the first one that matches decides. A comma inside brackets,
//! or after a backslash, is part of the pattern: `blk\.\d{1,2}\.ffn=int8`. Without a match, F16
//! weights are multiplied in FP16 and quantized ones in INT8, except those on which results depend
//! most.

use regex_lite::Regex;

/// Arithmetic that a rule chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// FP16 × FP16.
    Fp16,
    /// INT8 × INT8.
    Int8,
    /// INT8 × INT8 without a rotation.
    Int8Unrotated,
    /// INT8 × INT8, with activations as two digits.
    Int8Wide,
    /// INT4 weights, in the arithmetic that the chip has for them.
    Int4,
    /// INT4 weights × FP16.
    Int4Fp16,
    /// Not on the NPU.
    Cpu,
}

/// The words of a rule.
const CHOICES: [(&str, Choice); 7] = [
    ("fp16", Choice::Fp16),
    ("int8", Choice::Int8),
    ("int8-plain", Choice::Int8Unrotated),
    ("int8-wide", Choice::Int8Wide),
    ("int4", Choice::Int4),
    ("int4-fp16", Choice::Int4Fp16),
    ("cpu", Choice::Cpu),
];

/// Returns the words, for messages.
#[must_use]
pub fn choices() -> [&'static str; 7] {
    CHOICES.map(|(word, _)| word)
}

/// Rules in the order in which they are tried.
///
/// ```
/// use ggml_rust_npu::config::rules::{Choice, Rules};
///
/// let rules = Rules::parse("ffn_(up|gate)=int4, ^output=fp16")?;
/// assert_eq!(rules.choice("blk.3.ffn_up.weight"), Some(Choice::Int4));
/// assert_eq!(rules.choice("blk.3.attn_q.weight"), None);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Rules(Vec<Rule>);

#[derive(Clone, Debug)]
struct Rule {
    /// As it was written: `pattern=choice`.
    text: String,
    pattern: Regex,
    choice: Choice,
}

impl Rules {
    /// Reads a list of rules.
    ///
    /// # Errors
    /// A text that names the wrong rule and its mistake.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rules = split(text).into_iter().map(str::trim);
        let rules = rules.filter(|rule| !rule.is_empty());
        rules.map(Self::rule).collect::<Result<_, _>>().map(Self)
    }

    fn rule(rule: &str) -> Result<Rule, String> {
        let (pattern, word) = rule
            .rsplit_once('=')
            .ok_or_else(|| format!("rule {rule:?} has no '='"))?;
        let choice = CHOICES.iter().find(|(known, _)| *known == word.trim());
        let (_, choice) = choice.ok_or_else(|| format!("rule {rule:?} asks for {word:?}"))?;
        let pattern = Regex::new(pattern.trim())
            .map_err(|error| format!("rule {rule:?} is no regular expression: {error}"))?;
        Ok(Rule {
            text: rule.to_owned(),
            pattern,
            choice: *choice,
        })
    }

    /// Returns the choice of the first rule that matches a tensor's name, if any.
    #[must_use]
    pub fn choice(&self, name: &str) -> Option<Choice> {
        Some(self.0[self.rule_of(name)?].choice)
    }

    fn rule_of(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|rule| rule.pattern.is_match(name))
    }

    /// Checks that each rule decides the arithmetic of a weight.
    ///
    /// - `names`: those of all weights that the NPU could multiply with
    ///
    /// # Errors
    /// A text that names the rule.
    pub fn check(&self, names: &[&str]) -> Result<(), String> {
        for (index, rule) in self.0.iter().enumerate() {
            if names.iter().any(|name| self.rule_of(name) == Some(index)) {
                continue;
            }
            let reason = match names.iter().find(|name| rule.pattern.is_match(name)) {
                Some(name) => format!("an earlier rule decides {name}"),
                None => "no weight for the NPU has such a name".to_owned(),
            };
            return Err(format!("{}: {reason}", rule.text));
        }
        Ok(())
    }

    /// Returns `true` if a rule contains `choice`.
    #[must_use]
    pub fn ask_for(&self, choice: Choice) -> bool {
        self.0.iter().any(|rule| rule.choice == choice)
    }
}

/// Cuts a list at the commas that are not inside of brackets and not after a backslash.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut escaped, mut closing) = (false, None);
    for (at, character) in text.char_indices() {
        match (character, closing) {
            _ if escaped => escaped = false,
            ('\\', _) => escaped = true,
            (_, Some(end)) => closing = closing.filter(|_| character != end),
            ('[', None) => closing = Some(']'),
            ('{', None) => closing = Some('}'),
            (',', None) => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_inside_of_brackets_is_part_of_the_pattern() {
        let rules =
            Rules::parse(r"^blk\.\d{1,2}\.ffn=int4,[a,b]_norm=cpu,x\,y=fp16,attn=int8").unwrap();
        assert_eq!(rules.choice("blk.12.ffn_up.weight"), Some(Choice::Int4));
        assert_eq!(rules.choice("blk.123.ffn_up.weight"), None);
        assert_eq!(rules.choice("a_norm"), Some(Choice::Cpu));
        assert_eq!(rules.choice("x,y"), Some(Choice::Fp16));
        assert_eq!(rules.choice("blk.0.attn_q.weight"), Some(Choice::Int8));
        // An unclosed bracket includes all text that follows, and the error names the whole rule.
        let error = Rules::parse("ffn{1=int8,attn=int8").unwrap_err();
        assert!(error.contains("ffn{1=int8,attn=int8"), "{error}");
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = Rules::parse(
            r"ffn_down=int8, blk\.\d+\.ffn_=int4 ,^output=fp16,token=cpu,attn_q=int4-fp16,attn_k=int8-plain",
        )
        .unwrap();
        assert_eq!(rules.choice("blk.3.ffn_down.weight"), Some(Choice::Int8));
        assert_eq!(rules.choice("blk.3.ffn_up.weight"), Some(Choice::Int4));
        assert_eq!(rules.choice("output.weight"), Some(Choice::Fp16));
        assert_eq!(rules.choice("token_embd.weight"), Some(Choice::Cpu));
        assert_eq!(rules.choice("blk.3.attn_q.weight"), Some(Choice::Int4Fp16));
        assert_eq!(
            rules.choice("blk.3.attn_k.weight"),
            Some(Choice::Int8Unrotated)
        );
        assert_eq!(rules.choice("blk.3.attn_output.weight"), None);
        assert!(rules.ask_for(Choice::Int4) && !Rules::default().ask_for(Choice::Int4));
    }

    #[test]
    fn a_rule_that_decides_nothing_is_named() {
        let check = |text| {
            Rules::parse(text)
                .unwrap()
                .check(&["blk.0.ffn_up.weight", "blk.0.ffn_down.weight"])
        };
        assert_eq!(check(""), Ok(()));
        assert_eq!(check("ffn_down=int8,ffn=int4"), Ok(()));
        let error = check("ffn_up=int8, ffn_dwon=int4").unwrap_err();
        assert_eq!(
            error,
            "ffn_dwon=int4: no weight for the NPU has such a name"
        );
        let error = check("ffn=int8,ffn_down=int4").unwrap_err();
        assert_eq!(
            error,
            "ffn_down=int4: an earlier rule decides blk.0.ffn_down.weight"
        );
    }

    #[test]
    fn a_wrong_rule_is_named() {
        for (text, word) in [
            ("ffn_=int8,attn", "attn"),
            ("ffn_=int5", "int5"),
            ("ffn_(=int8", "regular expression"),
        ] {
            let error = Rules::parse(text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
