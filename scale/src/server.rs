//! Requests to llama-server.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Request;

use crate::Error;
use crate::journal::MAX_TOKENS;

/// Longest body that is read: embeddings of a few thousand tokens, as text.
const MAX_BODY_BYTES: u64 = 512 << 20;
/// Longest part of a foreign text in an error.
const MAX_QUOTE_CHARS: usize = 200;
/// Most sequences of a llama-server.
///
/// SOURCE: `LLAMA_MAX_SEQ`, src/llama-cparams.h of llama.cpp 0.5.0.
pub(crate) const MAX_SLOTS: usize = 256;

/// A llama-server.
#[derive(Debug)]
pub struct LlamaServer {
    url: String,
    agent: Agent,
    timeout_s: u64,
    slots: usize,
    model: String,
    free: Mutex<usize>,
    freed: Condvar,
}

/// The rules for the random choice of tokens.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// Temperature.
    pub temperature: f64,
    /// Least sum of probabilities of the tokens to sample from.
    pub top_p: f64,
    /// Likeliest tokens to sample from; 0: all.
    pub top_k: u32,
    /// Likeliest tokens whose probabilities make up the self-certainty.
    pub n_probs: usize,
}

/// A request for completions of one prompt.
#[derive(Clone, Debug)]
pub struct CompletionRequest<'a> {
    /// The text to go on with.
    pub prompt: &'a str,
    /// Number of completions.
    pub n: usize,
    /// Seed of the first; the others have the next numbers.
    pub seed: u32,
    /// Most tokens of each.
    pub max_tokens: usize,
    /// The text that ends a completion, if any. It is not part of the completion.
    pub stop: Option<&'a str>,
}

/// The reason for the end of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended its text.
    End,
    /// The requested stop text.
    Word,
    /// The completion has the largest allowed length.
    Length,
}

/// A completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Continuation {
    /// The generated text.
    pub text: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of tokens whose probabilities are known.
    pub listed: usize,
    /// The reason for its end.
    pub stop: StopReason,
    /// Sum over the listed tokens of the logarithm of the probability.
    pub logprob: f64,
    /// Sum over the listed tokens of the mean of -ln p of the likeliest tokens.
    pub certainty: f64,
}

/// The part of `/props` that is used.
#[derive(Deserialize)]
struct Props {
    total_slots: usize,
    #[serde(default)]
    model_path: String,
}

/// The part of a completion that is used.
#[derive(Deserialize)]
struct RawCompletion {
    content: String,
    tokens_predicted: usize,
    stop_type: String,
    /// Without the tokens of the stop word, and without those that end in a part of a character.
    #[serde(default)]
    completion_probabilities: Vec<RawToken>,
}

#[derive(Deserialize)]
struct RawToken {
    logprob: f64,
    #[serde(default)]
    top_logprobs: Vec<RawLikely>,
}

#[derive(Deserialize)]
struct RawLikely {
    logprob: f64,
}

/// Least logarithm of a probability that is counted. llama-server writes the least F32 for a
/// probability of 0.
///
/// SOURCE: `completion_token_output::logarithm`, tools/server/server-task.cpp of llama.cpp 0.5.0;
/// the number is that of the least positive F32.
pub(crate) const MIN_LOGPROB: f64 = -103.28;

impl From<RawCompletion> for Continuation {
    fn from(raw: RawCompletion) -> Self {
        let (mut logprob, mut certainty) = (0.0, 0.0);
        for token in &raw.completion_probabilities {
            logprob += token.logprob.clamp(MIN_LOGPROB, 0.0);
            let likely = &token.top_logprobs;
            let sum: f64 = likely
                .iter()
                .map(|likely| -likely.logprob.clamp(MIN_LOGPROB, 0.0))
                .sum();
            certainty += sum / likely.len().max(1) as f64;
        }
        Self {
            text: raw.content,
            tokens: raw.tokens_predicted,
            listed: raw.completion_probabilities.len(),
            stop: match raw.stop_type.as_str() {
                "word" => StopReason::Word,
                "limit" => StopReason::Length,
                _ => StopReason::End,
            },
            logprob,
            certainty,
        }
    }
}

/// Slots of the server that a request uses, until it is dropped.
struct Permit<'a> {
    server: &'a LlamaServer,
    slots: usize,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut free = self
            .server
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *free += self.slots;
        self.server.freed.notify_all();
    }
}

impl LlamaServer {
    /// Queries a server's model and number of slots.
    ///
    /// - `url`: as `http://127.0.0.1:8080`
    /// - `timeout_s`: seconds to wait for an answer to each request
    ///
    /// # Errors
    /// If the server does not answer as llama-server does.
    pub fn connect(url: &str, timeout_s: u64) -> Result<Self, Error> {
        let url = url.trim_end_matches('/').to_owned();
        if !url.starts_with("http://") {
            return Err(Error::Settings(format!(
                "{url} does not begin with http://"
            )));
        }
        let mut server = Self {
            url,
            agent: agent(timeout_s),
            timeout_s,
            slots: 1,
            model: String::new(),
            free: Mutex::new(1),
            freed: Condvar::new(),
        };
        let props: Props = server.ask("/props", None)?;
        // Limited, because this number of threads is started.
        server.slots = props.total_slots.clamp(1, MAX_SLOTS);
        server.free = Mutex::new(server.slots);
        server.model = props
            .model_path
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .into();
        Ok(server)
    }

    /// Number of sequences that the server computes at the same time.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Name of the model's file.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Formats a conversation of one message as the model's chat template has it.
    ///
    /// # Errors
    /// An error of the server.
    pub fn chat_prompt(&self, message: &str) -> Result<String, Error> {
        #[derive(Deserialize)]
        struct Formatted {
            prompt: String,
        }
        let body = json!({"messages": [{"role": "user", "content": message}]});
        let formatted: Formatted = self.ask("/apply-template", Some(&body))?;
        Ok(formatted.prompt)
    }

    /// Samples completions of a prompt, whose keys and values are computed once. If there are more
    /// completions than the server has slots, several requests are made.
    ///
    /// # Errors
    /// An error of the server.
    pub fn complete(
        &self,
        request: &CompletionRequest,
        sampling: &Sampling,
    ) -> Result<Vec<Continuation>, Error> {
        let mut all = Vec::with_capacity(request.n);
        while all.len() < request.n {
            let n = (request.n - all.len()).min(self.slots);
            let seed = request
                .seed
                .wrapping_add(u32::try_from(all.len()).unwrap_or(0));
            let body = json!({
                "prompt": request.prompt,
                "n_cmpl": n,
                "n_predict": request.max_tokens,
                "seed": seed,
                "stop": request.stop.iter().collect::<Vec<_>>(),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "repeat_penalty": 1.0,
                "n_probs": sampling.n_probs,
                "cache_prompt": true,
                "response_fields": [
                    "index", "content", "tokens_predicted", "stop_type", "completion_probabilities"
                ],
            });
            let _slots = self.acquire(n);
            // A single completion comes as an object, several as an array.
            let answer: Value = self.ask("/completion", Some(&body))?;
            let answers = match answer {
                Value::Array(answers) => answers,
                answer => vec![answer],
            };
            if answers.len() != n {
                let reason = format!("{} completions instead of {n}", answers.len());
                return Err(self.garbage("/completion", reason));
            }
            for answer in answers {
                let raw = serde_json::from_value::<RawCompletion>(answer);
                let raw = raw.map_err(|error| self.garbage("/completion", error.to_string()))?;
                if raw.tokens_predicted > MAX_TOKENS {
                    let reason = format!("{} tokens, at most {MAX_TOKENS}", raw.tokens_predicted);
                    return Err(self.garbage("/completion", reason));
                }
                all.push(raw.into());
            }
        }
        Ok(all)
    }

    /// Waits until `slots` slots are not used by this process.
    fn acquire(&self, slots: usize) -> Permit<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < slots {
            free = self
                .freed
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        }
        *free -= slots;
        Permit {
            server: self,
            slots,
        }
    }

    /// Makes tokens of a text.
    ///
    /// - `special`: begin with the model's token for the beginning of a text, if it has one
    ///
    /// # Errors
    /// An error of the server.
    pub fn tokenize(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        #[derive(Deserialize)]
        struct Tokens {
            tokens: Vec<u32>,
        }
        let body = json!({"content": text, "add_special": special});
        Ok(self.ask::<Tokens>("/tokenize", Some(&body))?.tokens)
    }

    /// Sends a request that uses one slot.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn ask_in_slot<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Error> {
        let _slot = self.acquire(1);
        self.ask(path, Some(body))
    }

    /// Returns the error of an answer that is not llama-server's.
    #[must_use]
    pub fn garbage(&self, path: &str, reason: String) -> Error {
        let url = format!("{}{path}", self.url);
        Error::Garbage { url, reason }
    }

    /// Sends a request: a POST if there is a body.
    ///
    /// # Errors
    /// An error of the network or of the server, or an answer that is not a `T`.
    pub fn ask<T: DeserializeOwned>(&self, path: &str, body: Option<&Value>) -> Result<T, Error> {
        let url = format!("{}{path}", self.url);
        let failed = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => Error::Timeout {
                url: url.clone(),
                seconds: self.timeout_s,
            },
            ureq::Error::BodyExceedsLimit(limit) => {
                self.garbage(path, format!("longer than {limit} bytes"))
            }
            error => Error::Unreachable {
                url: url.clone(),
                reason: error.to_string(),
            },
        };
        let response = match body {
            Some(body) => Request::post(&url)
                .header("Content-Type", "application/json")
                .body(body.to_string())
                .map_err(ureq::Error::from)
                .and_then(|request| self.agent.run(request)),
            None => self.agent.get(&url).call(),
        };
        let mut response = response.map_err(failed)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(MAX_BODY_BYTES);
        let bytes = body.read_to_vec().map_err(failed)?;
        if status != 200 {
            let words: Option<Value> = serde_json::from_slice(&bytes).ok();
            let words =
                words.and_then(|words| Some(words["error"]["message"].as_str()?.to_owned()));
            let words = words.unwrap_or_else(|| String::from_utf8_lossy(&bytes).into());
            return Err(Error::Status {
                url,
                status,
                message: words.chars().take(MAX_QUOTE_CHARS).collect(),
            });
        }
        serde_json::from_slice(&bytes).map_err(|error| self.garbage(path, error.to_string()))
    }
}

/// Returns a client whose requests end after `timeout_s` seconds. Each has a separate connection,
/// and none goes through a proxy.
pub(crate) fn agent(timeout_s: u64) -> Agent {
    Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(timeout_s)))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .max_idle_connections(0)
        .proxy(None)
        .build()
        .new_agent()
}

#[cfg(test)]
pub(crate) mod tests;
