//! Scores of the steps of a solution.

use std::fmt;

mod reward;

pub use self::reward::{HeadWeights, PlusMinus, ValueHead, Verifier};

use crate::Error;
use crate::search::Solution;

/// Gives each step of a solution a number; larger is better.
pub trait Scorer: Sync {
    /// Scores the steps of solutions to one question. A solution has at least one score.
    ///
    /// # Errors
    /// Those of a server or a verifier.
    fn score(&self, question: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error>;
}

/// A rule that makes one score of those of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregate {
    /// The score of the last step.
    Last,
    /// The least.
    Min,
    /// The product.
    Product,
    /// The mean.
    Mean,
}

impl Aggregate {
    /// Makes one score; not a number if there is none.
    #[must_use]
    pub fn of(self, scores: &[f64]) -> f64 {
        match self {
            Self::Last => scores.last().copied().unwrap_or(f64::NAN),
            Self::Min => scores.iter().copied().reduce(f64::min).unwrap_or(f64::NAN),
            Self::Product => scores
                .iter()
                .copied()
                .reduce(|a, b| a * b)
                .unwrap_or(f64::NAN),
            Self::Mean => scores.iter().sum::<f64>() / scores.len() as f64,
        }
    }
}

impl fmt::Display for Aggregate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Last => "last",
            Self::Min => "min",
            Self::Product => "product",
            Self::Mean => "mean",
        })
    }
}

/// The mean probability of a step's tokens: e to the mean of their logarithms.
#[derive(Clone, Copy, Debug)]
pub struct LogProbability;

impl Scorer for LogProbability {
    fn score(&self, _: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let steps = |solution: &&Solution| {
            let steps = solution.steps.iter();
            steps
                .map(|step| (step.logprob / step.listed.max(1) as f64).exp())
                .collect()
        };
        Ok(solutions.iter().map(steps).collect())
    }
}

/// The mean over a step's tokens of the mean of -ln p of the likeliest tokens. It is large where
/// their probabilities are far from being equal.
///
/// SOURCE: Fu et al., Deep Think with Confidence, 2025, equation 2: self-certainty (Kang et al., 2025)
/// of the likeliest tokens, without a constant.
#[derive(Clone, Copy, Debug)]
pub struct SelfCertainty;

impl Scorer for SelfCertainty {
    fn score(&self, _: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let steps = |solution: &&Solution| {
            let steps = solution.steps.iter();
            steps
                .map(|step| step.certainty / step.listed.max(1) as f64)
                .collect()
        };
        Ok(solutions.iter().map(steps).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::Sampled;

    #[test]
    fn means_are_over_the_tokens_whose_probabilities_are_known() {
        let step = |tokens, listed, logprob, certainty| Sampled {
            tokens,
            listed,
            logprob,
            certainty,
        };
        let solution = Solution {
            steps: vec![
                step(3, 2, -1.0, 4.0),
                step(5, 4, -1.0, 2.0),
                step(1, 0, 0.0, 0.0),
            ],
            ..Solution::default()
        };
        let score = |scorer: &dyn Scorer| scorer.score("", &[&solution]).unwrap();
        let probabilities = [(-0.5_f64).exp(), (-0.25_f64).exp(), 1.0];
        assert_eq!(score(&LogProbability), [probabilities]);
        assert_eq!(score(&SelfCertainty), [[2.0, 0.5, 0.0]]);
        assert_eq!(solution.mean_logprob(), -2.0 / 6.0);
        assert_eq!(solution.tokens(), 9);
    }
}
