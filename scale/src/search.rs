//! Solutions of one question: independent samples, beam search by steps, diverse trees.

pub mod tree;

use crate::Error;
use crate::server::{
    CompletionRequest, Continuation, LlamaServer, MIN_LOGPROB, Sampling, StopReason,
};

/// A source of continuations of a text.
pub trait Generator: Sync {
    /// Samples completions.
    ///
    /// # Errors
    /// An error of the server.
    fn complete(&self, request: &CompletionRequest) -> Result<Vec<Continuation>, Error>;
}

/// A server with its sampling.
#[derive(Debug)]
pub struct Sampler<'a> {
    /// The server.
    pub server: &'a LlamaServer,
    /// The rules for its random choice of tokens.
    pub sampling: Sampling,
}

impl Generator for Sampler<'_> {
    fn complete(&self, request: &CompletionRequest) -> Result<Vec<Continuation>, Error> {
        self.server.complete(request, &self.sampling)
    }
}

/// A part of a solution that was sampled in one go.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of tokens with known probabilities; means are over these.
    pub listed: usize,
    /// Sum of the logarithms of their probabilities.
    pub logprob: f64,
    /// Sum of their self-certainties.
    pub certainty: f64,
}

/// A solution, whole or not yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The text so far.
    pub text: String,
    /// The parts of the text.
    pub steps: Vec<Sampled>,
    /// Scores of its steps.
    pub scores: Vec<f64>,
    /// The reason for the end of its last part.
    pub stop: StopReason,
}

impl Solution {
    /// Adds a sample's tokens and text.
    fn push(&mut self, completion: Continuation) {
        self.text += &completion.text;
        self.stop = completion.stop;
        self.steps.push(Sampled {
            tokens: completion.tokens,
            listed: completion.listed,
            logprob: completion.logprob,
            certainty: completion.certainty,
        });
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.steps.iter().map(|step| step.tokens).sum()
    }

    /// Returns the mean logarithm of the probabilities of the listed tokens, and the least one if
    /// none is listed.
    #[must_use]
    pub fn mean_logprob(&self) -> f64 {
        let sum: f64 = self.steps.iter().map(|step| step.logprob).sum();
        let listed: usize = self.steps.iter().map(|step| step.listed).sum();
        if listed == 0 {
            return MIN_LOGPROB;
        }
        sum / listed as f64
    }
}

impl Default for Solution {
    /// Nothing yet.
    fn default() -> Self {
        Self {
            text: String::new(),
            steps: Vec::new(),
            scores: Vec::new(),
            stop: StopReason::Word,
        }
    }
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// Whole solutions.
    pub solutions: Vec<Solution>,
    /// Number of sampled tokens, including those of solutions that were given up.
    pub tokens: usize,
}

/// Samples `n` independent solutions.
///
/// # Errors
/// An error of the server.
pub fn sample(
    generator: &dyn Generator,
    prompt: &str,
    n: usize,
    max_tokens: usize,
    seed: u32,
) -> Result<SearchResult, Error> {
    let completions = generator.complete(&CompletionRequest {
        prompt,
        n,
        seed,
        max_tokens,
        stop: None,
    })?;
    let solutions: Vec<Solution> = completions
        .into_iter()
        .map(|completion| {
            let mut solution = Solution::default();
            solution.push(completion);
            solution
        })
        .collect();
    let tokens = solutions.iter().map(Solution::tokens).sum();
    Ok(SearchResult { solutions, tokens })
}
