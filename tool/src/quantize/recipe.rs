//! The type that each tensor of the output gets.

use std::collections::BTreeMap;
use std::str::FromStr;

use clap::ValueEnum as _;
use ggml_rust_npu::gguf::TensorInfo;
use regex_lite::Regex;

use super::block::{BLOCK, Format};
use crate::ToolError;
use crate::text::say;

/// A type for the weights whose names match a pattern.
#[derive(Clone, Debug)]
pub struct TypeRule {
    /// As it was written: `PATTERN=TYPE`.
    pub text: String,
    pattern: Regex,
    format: Format,
}

impl FromStr for TypeRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((pattern, name)) = text
            .rsplit_once('=')
            .filter(|(pattern, _)| !pattern.is_empty())
        else {
            return Err("not PATTERN=TYPE, such as ffn_down=q8_0".to_owned());
        };
        let format = Format::from_str(name, true).map_err(|_| {
            let names = Format::value_variants()
                .iter()
                .filter_map(|format| format.to_possible_value());
            let names: Vec<String> = names.map(|name| name.get_name().to_owned()).collect();
            format!("{name:?} is none of the types {}", names.join(", "))
        })?;
        let pattern = Regex::new(pattern)
            .map_err(|error| format!("{pattern:?} is no regular expression: {error}"))?;
        Ok(Self {
            text: text.to_owned(),
            pattern,
            format,
        })
    }
}

/// The types of a model's weights.
#[derive(Clone, Copy, Debug)]
pub struct Recipe<'a> {
    /// The type of weights in the blocks of the model.
    pub blocks: Format,
    /// The type of the token embeddings and of the output head.
    pub embeddings: Option<Format>,
    /// The first rule that matches a weight decides.
    pub rules: &'a [TypeRule],
}

impl Recipe<'_> {
    /// Checks that each rule decides the type of a weight, which no rule does for routers of
    /// experts.
    ///
    /// - `tensors`: all of the new file, by their names there
    ///
    /// # Errors
    /// Text that names the rule.
    pub fn check(&self, tensors: &[(&str, &TensorInfo)]) -> Result<(), ToolError> {
        let weights = tensors.iter().filter(|(_, tensor)| is_weight(tensor));
        let names = weights.map(|(name, _)| *name);
        let (routers, names): (Vec<&str>, Vec<&str>) = names.partition(|name| is_router(name));
        for (index, rule) in self.rules.iter().enumerate() {
            if names.iter().any(|name| self.rule_of(name) == Some(index)) {
                continue;
            }
            let matches = |name: &&&str| rule.pattern.is_match(name);
            let reason = match (names.iter().find(matches), routers.iter().find(matches)) {
                (Some(name), _) => format!("an earlier rule decides {name}"),
                (None, Some(name)) => format!("{name} chooses experts: no rule decides its type"),
                (None, None) => "no weight of the model has such a name".to_owned(),
            };
            return Err(format!("--tensor-type {}: {reason}", rule.text).into());
        }
        Ok(())
    }

    /// Returns the type that a tensor gets; `None` for one that is kept.
    pub fn format_of(&self, name: &str, tensor: &TensorInfo) -> Option<Format> {
        self.meant(name, tensor)?.fitting(tensor.ne[0])
    }

    /// Says which weights get another type than was meant for them, and why: a line for each kept
    /// one, and one for all that become another type.
    ///
    /// - `tensors`: as in [`check`](Self::check)
    pub fn say_exceptions(&self, tensors: &[(&str, &TensorInfo)]) {
        let mut others: BTreeMap<_, Vec<&str>> = BTreeMap::new();
        for (name, tensor) in tensors {
            let k = tensor.ne[0];
            let Some(meant) = self.meant(name, tensor) else {
                continue;
            };
            match meant.fitting(k) {
                None => say(format_args!(
                    "{name} stays as it is: its rows of {k} are not whole blocks of {BLOCK}"
                )),
                Some(given) if given != meant => {
                    let names = (given.dtype().name(), meant.dtype().name());
                    others.entry(names).or_default().push(name);
                }
                Some(_) => {}
            }
        }
        for ((given, meant), names) in others {
            let count = names.len();
            say(format_args!(
                "{count} weights become {given} and not {meant}, as with llama-quantize: their rows are not whole \
                 blocks of 256 (the first is {})",
                names[0]
            ));
        }
    }

    /// Returns the recipe's type for a tensor, without regard to its rows; `None` for one that no
    /// part of the recipe names.
    fn meant(&self, name: &str, tensor: &TensorInfo) -> Option<Format> {
        if !is_weight(tensor) || is_router(name) {
            return None;
        }
        if let Some(rule) = self.rule_of(name) {
            return Some(self.rules[rule].format);
        }
        match name {
            "token_embd.weight" | "output.weight" => {
                Some(self.embeddings.unwrap_or(match self.blocks {
                    Format::F32 | Format::F16 => self.blocks,
                    _ => Format::Q8_0,
                }))
            }
            name if name.starts_with("blk.") => Some(self.blocks),
            _ => None,
        }
    }

    fn rule_of(&self, name: &str) -> Option<usize> {
        self.rules
            .iter()
            .position(|rule| rule.pattern.is_match(name))
    }
}

/// Returns `true` for the name of a router of experts. Routers keep their type: a wrong choice
/// costs more than the bytes.
// SOURCE: tensor_allows_quantization, llama-quant.cpp of llama.cpp 0.5.0, which is consulted before
// the patterns of --tensor-type.
fn is_router(name: &str) -> bool {
    name.contains("ffn_gate_inp")
}

/// Returns `true` if a tensor is a matrix of weights, or an embedding.
pub fn is_weight(tensor: &TensorInfo) -> bool {
    tensor.name.ends_with(".weight") && tensor.dims >= 2 && tensor.rows() > 1
}
