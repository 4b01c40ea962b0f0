//! Scores of the steps of a solution.

use std::fmt;

mod reward;

pub use self::reward::{HeadWeights, PlusMinus, ValueHead, Verifier};

use crate::Error;
use crate::search::{Sampled, Solution};

/// Gives each step of a solution a number; larger is better.
pub trait Scorer: Sync {
    /// Scores the steps of solutions to one question. A solution without any known probabilities
    /// has no score.
    ///
    /// # Errors
    /// Errors of a server or a verifier.
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
    /// Returns one score from the scores of the steps; not a number if there are none.
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
///
/// A step without known probabilities repeats the score of the step before it, or has none.
#[derive(Clone, Copy, Debug)]
pub struct LogProbability;

impl Scorer for LogProbability {
    fn score(&self, _: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let mean = |step: &Sampled| (step.logprob / step.listed as f64).exp();
        Ok(known_scores(solutions, mean))
    }
}

/// The mean over a step's tokens of the mean of -ln p of the likeliest tokens. It is large where
/// their probabilities are far from being equal.
///
/// A step without known probabilities repeats the score of the step before it, or has none.
///
/// SOURCE: Fu et al., Deep Think with Confidence, 2025, equation 2: self-certainty (Kang et
/// al., 2025) of the likeliest tokens, without a constant.
#[derive(Clone, Copy, Debug)]
pub struct SelfCertainty;

impl Scorer for SelfCertainty {
    fn score(&self, _: &str, solutions: &[&Solution]) -> Result<Vec<Vec<f64>>, Error> {
        let mean = |step: &Sampled| step.certainty / step.listed as f64;
        Ok(known_scores(solutions, mean))
    }
}

/// Scores each step that has known probabilities by `mean`. A step without any has ended before its
/// first token. It repeats the previous score, so that it makes the solution neither better nor
/// worse.
fn known_scores(solutions: &[&Solution], mean: impl Fn(&Sampled) -> f64) -> Vec<Vec<f64>> {
    let scores = |solution: &&Solution| {
        let steps = solution.steps.iter();
        let repeated = steps.scan(None, |last, step| {
            if step.listed > 0 {
                *last = Some(mean(step));
            }
            Some(*last)
        });
        repeated.flatten().collect()
    };
    solutions.iter().map(scores).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Answer;
    use crate::choose::{Ballot, best};

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
        let last = (-0.25_f64).exp();
        assert_eq!(score(&LogProbability), [[(-0.5_f64).exp(), last, last]]);
        assert_eq!(score(&SelfCertainty), [[2.0, 0.5, 0.5]]);
        assert_eq!(solution.mean_logprob(), -2.0 / 6.0);
        assert_eq!(solution.tokens(), 9);
    }

    #[test]
    fn a_solution_without_known_probabilities_is_never_the_best() {
        let step = |listed, logprob, certainty| Sampled {
            tokens: 1,
            listed,
            logprob,
            certainty,
        };
        let (empty, known) = (step(0, 0.0, 0.0), step(1, -2.0, 0.5));
        let solution = |steps: &[&Sampled]| Solution {
            steps: steps.iter().copied().cloned().collect(),
            ..Solution::default()
        };
        let solutions = [
            solution(&[&empty]),
            solution(&[&known]),
            solution(&[&empty, &known]),
        ];
        let all: Vec<&Solution> = solutions.iter().collect();
        for scorer in [&LogProbability as &dyn Scorer, &SelfCertainty] {
            let scores = scorer.score("", &all).unwrap();
            assert_eq!(scores[1], scores[2]);
            for rule in [
                Aggregate::Last,
                Aggregate::Min,
                Aggregate::Product,
                Aggregate::Mean,
            ] {
                let ballots = [0, 1].map(|index| Ballot {
                    answer: Some(Answer::parse("1")),
                    weight: rule.of(&scores[index]),
                });
                assert_eq!(best(&ballots), Some(1), "{rule}");
            }
            // The journal can store only finite numbers.
            assert!(scores.iter().flatten().all(|score| score.is_finite()));
        }
        assert!(solutions[0].mean_logprob() < solutions[1].mean_logprob());
    }
}
