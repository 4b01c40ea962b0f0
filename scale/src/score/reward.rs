//! Scores from a reward model or a program, which are separate from the model that samples.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};

use super::Scorer;
use crate::Error;
use crate::answer::extract;
use crate::search::Solution;
use crate::search::tree::STEP_END;
use crate::server::LlamaServer;

/// Added to the logits of the two tokens, so that no other token can be sampled.
const BIAS: f64 = 1000.0;

/// Returns the steps of a solution: the parts between empty lines.
fn steps(text: &str) -> Vec<&str> {
    let steps = text.split(STEP_END).map(str::trim);
    let steps: Vec<&str> = steps.filter(|step| !step.is_empty()).collect();
    if steps.is_empty() { vec![""] } else { steps }
}

/// A process reward model that writes `+` or `-` after each step: the score is the probability of
/// `+` among the two.
#[derive(Debug)]
pub struct PlusMinus {
    server: LlamaServer,
    /// The text for the model, with `{question}` and `{steps}`.
    prompt: String,
    tokens: [u32; 2],
}

impl PlusMinus {
    /// Finds the two tokens.
    ///
    /// # Errors
    /// An error of the server; [`Error::Settings`] if a sign is not one token.
    pub fn new(server: LlamaServer, prompt: String, signs: [&str; 2]) -> Result<Self, Error> {
        let mut tokens = [0; 2];
        for (token, sign) in tokens.iter_mut().zip(signs) {
            *token = match server.tokenize(sign, false)?.as_slice() {
                [one] => *one,
                more => {
                    let words = format!(
                        "{sign:?} is {} tokens of the reward model, not 1",
                        more.len()
                    );
                    return Err(Error::Settings(words));
                }
            };
        }
        Ok(Self {
            server,
            prompt,
            tokens,
        })
    }

    fn probability(&self, prompt: &str) -> Result<f64, Error> {
        #[derive(Deserialize)]
        struct Reply {
            completion_probabilities: Vec<NextToken>,
        }
        #[derive(Deserialize)]
        struct NextToken {
            top_probs: Vec<Likely>,
        }
        #[derive(Deserialize)]
        struct Likely {
            id: u32,
            prob: f64,
        }
        let [plus, minus] = self.tokens;
        let body = json!({
            "prompt": prompt,
            "n_predict": 1,
            "temperature": 1.0,
            "samplers": ["top_k", "temperature"],
            "top_k": 2,
            "n_probs": 2,
            "post_sampling_probs": true,
            "logit_bias": [[plus, BIAS], [minus, BIAS]],
            "response_fields": ["completion_probabilities"],
        });
        let answer: Reply = self.server.ask_in_slot("/completion", &body)?;
        let likely = answer
            .completion_probabilities
            .first()
            .map(|place| &place.top_probs);
        let mut sum = 0.0;
        let mut found = 0.0;
        for likely in likely.into_iter().flatten() {
            if likely.id == plus {
                found = likely.prob;
            }
            if self.tokens.contains(&likely.id) {
                sum += likely.prob;
            }
        }
        let score = found / sum;
        if (0.0..=1.0).contains(&score) {
            return Ok(score);
        }
        let reason = "no probabilities of the two signs".into();
        Err(self.server.garbage("/completion", reason))
    }
}

impl Scorer for PlusMinus {
    fn score(&self, question: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let mut all = Vec::with_capacity(solutions.len());
        for solution in solutions {
            let steps = steps(&solution.text);
            let mut scores = Vec::with_capacity(steps.len());
            for count in 1..=steps.len() {
                let text = self
                    .prompt
                    .replace("{steps}", &steps[..count].join(STEP_END));
                scores.push(self.probability(&text.replace("{question}", question))?);
            }
            all.push(scores);
        }
        Ok(all)
    }
}

/// A value head: a linear function of the last hidden state, whose sigmoid is the score.
#[derive(Debug, Deserialize)]
pub struct HeadWeights {
    /// As many numbers as the model has embeddings.
    pub weight: Vec<f64>,
    /// Added to the product.
    pub bias: f64,
}

/// A reward model with a value head, on a server with `--embedding --pooling none`.
///
/// The text is the question, a line feed, and the steps with a line feed after each; a step's score
/// is that of its line feed. The parts are made tokens one by one, also a step and its line feed,
/// because a vocabulary may have a token for a full stop with a line feed.
///
/// SOURCE: `prepare_input`, model_utils/io_utils.py of SkyworkAI/skywork-o1-prm-inference.
#[derive(Debug)]
pub struct ValueHead {
    server: LlamaServer,
    head: HeadWeights,
    line_feed: u32,
}

impl ValueHead {
    /// Finds the token of a line feed.
    ///
    /// - `server`: a server with the model, without its head
    ///
    /// # Errors
    /// An error of the server; [`Error::Settings`] if it has no token for a line feed.
    pub fn new(server: LlamaServer, head: HeadWeights) -> Result<Self, Error> {
        // The tokenizer may put a token for the beginning of a word before the line feed, so only
        // the last one is used.
        let line_feed = server.tokenize("\n", false)?.last().copied();
        let none = || Error::Settings("the reward model has no token for a line feed".into());
        Ok(Self {
            line_feed: line_feed.ok_or_else(none)?,
            server,
            head,
        })
    }

    fn scores(&self, question: &str, text: &str) -> Result<Vec<f64>, Error> {
        #[derive(Deserialize)]
        struct Reply {
            embedding: Vec<Vec<f64>>,
        }
        let mut tokens = self.server.tokenize(&format!("{question}\n"), true)?;
        let mut ends = Vec::new();
        for step in steps(text) {
            tokens.extend(self.server.tokenize(step, false)?);
            ends.push(tokens.len());
            tokens.push(self.line_feed);
        }
        let body = json!({"content": [tokens]});
        let answers: Vec<Reply> = self.server.ask_in_slot("/embedding", &body)?;
        let states = answers
            .into_iter()
            .next()
            .map(|answer| answer.embedding)
            .unwrap_or_default();
        let garbage = |words: String| self.server.garbage("/embedding", words);
        if states.len() != tokens.len() {
            let (have, want) = (states.len(), tokens.len());
            let words = format!("{have} embeddings of {want} tokens; start it with --pooling none");
            return Err(garbage(words));
        }
        let score = |end: usize| {
            let state = &states[end];
            if state.len() != self.head.weight.len() {
                let (have, want) = (state.len(), self.head.weight.len());
                return Err(garbage(format!(
                    "embeddings of {have} numbers, and a head of {want}"
                )));
            }
            let product: f64 = state
                .iter()
                .zip(&self.head.weight)
                .map(|(x, w)| x * w)
                .sum();
            let score = (1.0 + (-product - self.head.bias).exp()).recip();
            // The journal is JSON, which cannot store NaN.
            match score.is_nan() {
                true => Err(garbage("an embedding whose product is not a number".into())),
                false => Ok(score),
            }
        };
        ends.into_iter().map(score).collect()
    }
}

impl Scorer for ValueHead {
    fn score(&self, question: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let all = solutions.iter();
        all.map(|solution| self.scores(question, &solution.text))
            .collect()
    }
}

/// A program that reads a solution, as JSON, and prints a number.
#[derive(Debug)]
pub struct Verifier {
    /// A command line for the shell.
    pub command: String,
}

impl Verifier {
    fn run(&self, question: &str, text: &str) -> Result<f64, Error> {
        let failed = |reason: String| Error::Verifier {
            command: self.command.clone(),
            reason,
        };
        let input: Value = json!({"question": question, "text": text, "answer": extract(text)});
        let mut child = Command::new("sh")
            .args(["-c", &self.command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A write error is ignored: a program that does not read all of its input may still
            // print a number.
            let _ = writeln!(stdin, "{input}");
        }
        let done = child
            .wait_with_output()
            .map_err(|error| failed(error.to_string()))?;
        if !done.status.success() {
            return Err(failed(done.status.to_string()));
        }
        let words = String::from_utf8_lossy(&done.stdout);
        let words = words.trim();
        let number = words
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite());
        number.ok_or_else(|| failed(format!("printed {words:?}, not a number")))
    }
}

impl Scorer for Verifier {
    fn score(&self, question: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let all = solutions.iter();
        all.map(|solution| Ok(vec![self.run(question, &solution.text)?]))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::StopReason;
    use crate::server::tests::{serve, with_body};

    fn score(scorer: &dyn Scorer) -> Result<Vec<Vec<f64>>, Error> {
        let solution = Solution {
            text: "4".into(),
            stop: StopReason::End,
            ..Solution::default()
        };
        scorer.score("2 + 2", &[&solution])
    }

    fn server(reply: impl Fn(&str) -> Value + Send + 'static) -> LlamaServer {
        let url = serve(
            move |path| {
                with_body(&match path {
                    "/props" => json!({"total_slots": 1}),
                    "/tokenize" => json!({"tokens": [7]}),
                    path => reply(path),
                })
            },
            false,
        );
        LlamaServer::connect(&url, 60).unwrap()
    }

    /// Regression: the journal had `null` for NaN, and could not be read afterwards.
    #[test]
    fn scores_that_are_no_numbers_are_refused() {
        for (x, y, expected) in [
            (0.5, 1.5, Some(0.25)),
            (1e308, -1e308, None),
            (0.0, 0.0, None),
            (-1.0, 3.0, None),
        ] {
            let likely = json!([{"top_probs": [{"id": 7, "prob": x}, {"id": 8, "prob": y}]}]);
            let reply = move |_: &str| json!({"completion_probabilities": likely});
            let scorer = PlusMinus {
                server: server(reply),
                prompt: "{question} {steps}".into(),
                tokens: [7, 8],
            };
            assert_eq!(
                score(&scorer).ok(),
                expected.map(|score| vec![vec![score]]),
                "{x} {y}"
            );
        }
        for (state, expected) in [([2.0, 2.0], Some(1.0)), ([2.0, -2.0], None)] {
            let reply = move |_: &str| json!([{"embedding": [state, state, state]}]);
            let head = HeadWeights {
                weight: vec![1.7e308; 2],
                bias: 0.0,
            };
            let scorer = ValueHead::new(server(reply), head).unwrap();
            assert_eq!(
                score(&scorer).ok(),
                expected.map(|score| vec![vec![score]]),
                "{state:?}"
            );
        }
    }
}
