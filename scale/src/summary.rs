//! Accuracy against N.

use serde::Serialize;

use crate::answer::Answer;
use crate::choose::{Ballot, best, vote};
use crate::journal::{RunSettings, Solved};
use crate::score::Aggregate;

/// A point: a method with a number of solutions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SummaryRow {
    /// Name of the model's file.
    pub model: String,
    /// The method.
    pub method: String,
    /// Number of solutions.
    pub n: usize,
    /// Number of problems.
    pub problems: usize,
    /// Problems with a right answer.
    pub correct: usize,
    /// The share of these problems.
    pub accuracy: f64,
    /// Lower end of the 95 % interval of the share.
    pub low: f64,
    /// Upper end of this interval.
    pub high: f64,
    /// Mean number of sampled tokens for a problem.
    pub tokens: f64,
    /// Modelled seconds for a problem, if the caller has a model.
    pub seconds: Option<f64>,
    /// Energy for a problem with all its solutions, if every problem's was measured.
    pub joules: Option<f64>,
}

/// Ways to choose among independent samples.
const CHOICES: [&str; 6] = [
    "pass",
    "majority",
    "majority-logprob",
    "best-of-n-logprob",
    "majority-score",
    "best-of-n",
];

/// Quantile of the normal distribution for intervals of 95 %.
const Z: f64 = 1.959_964;

/// Returns the Wilson score interval of 95 % of a share.
///
/// SOURCE: Wilson, Probable inference, the law of succession, and statistical inference, 1927.
#[must_use]
pub fn interval(correct: usize, problems: usize) -> (f64, f64) {
    if problems == 0 {
        return (0.0, 1.0);
    }
    let (n, share) = (problems as f64, correct as f64 / problems as f64);
    let square = Z * Z / n;
    let middle = (share + square / 2.0) / (1.0 + square);
    let half = Z / (1.0 + square) * (share * (1.0 - share) / n + square / (4.0 * n)).sqrt();
    ((middle - half).max(0.0), (middle + half).min(1.0))
}

/// Returns how many seconds samples of these lengths (in tokens) need if they begin at the same
/// time.
pub type Latency<'a> = &'a dyn Fn(&[usize]) -> f64;

/// Summarizes a journal.
///
/// For independent samples, each method of choosing among the first 1, 2, 4, … samples gives a
/// point; a search gives a single point, its choice. The seconds of a search are those of as many
/// samples as it has solutions, which share its tokens equally.
#[must_use]
pub fn summarize(
    settings: &RunSettings,
    entries: &[Solved],
    aggregate: Aggregate,
    latency: Option<Latency<'_>>,
) -> Vec<SummaryRow> {
    let text = |key: &str| {
        settings
            .get(key)
            .and_then(|value| value.as_str())
            .unwrap_or("")
    };
    let n = settings.get("n").and_then(|n| n.as_u64()).unwrap_or(1);
    let n = usize::try_from(n).unwrap_or(1);
    // The mean over all problems; `of` gives the lengths of a problem's samples.
    let seconds = |of: &dyn Fn(&Solved) -> Vec<usize>| {
        let sum =
            |latency: Latency<'_>| entries.iter().map(|entry| latency(&of(entry))).sum::<f64>();
        latency.map(|latency| sum(latency) / entries.len().max(1) as f64)
    };
    let row = |method: &str, n: usize, correct: usize, tokens: usize, seconds: Option<f64>| {
        let problems = entries.len();
        let (low, high) = interval(correct, problems);
        let mean = |sum: usize| sum as f64 / problems.max(1) as f64;
        SummaryRow {
            model: text("model").into(),
            method: method.into(),
            n,
            problems,
            correct,
            accuracy: mean(correct),
            low,
            high,
            tokens: mean(tokens),
            seconds,
            joules: None,
        }
    };
    let joules = || {
        let sum: Option<f64> = entries.iter().map(|entry| entry.joules).sum();
        sum.filter(|_| !entries.is_empty())
            .map(|sum| sum / entries.len() as f64)
    };
    let whole = |row: SummaryRow| SummaryRow {
        joules: joules(),
        ..row
    };
    if !matches!(text("method"), "majority" | "best-of-n") {
        let correct = entries.iter().filter(|entry| entry.correct).count();
        let tokens = entries.iter().map(|entry| entry.tokens).sum();
        let seconds = seconds(&|entry| vec![entry.tokens.div_ceil(n.max(1)); n]);
        return vec![whole(row(text("method"), n, correct, tokens, seconds))];
    }
    let answers: Vec<Vec<Option<Answer>>> = (entries.iter())
        .map(|entry| {
            let answers = entry
                .solutions
                .iter()
                .map(|solution| solution.answer.as_deref());
            answers.map(|answer| answer.map(Answer::parse)).collect()
        })
        .collect();
    let has_scores = entries
        .iter()
        .any(|entry| entry.solutions.iter().any(|s| !s.scores.is_empty()));
    let mut rows = Vec::new();
    for choice in CHOICES {
        if !has_scores && matches!(choice, "majority-score" | "best-of-n") {
            continue;
        }
        let powers = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k < n);
        for k in powers.chain([n]) {
            let (mut correct, mut tokens) = (0, 0);
            for (entry, answers) in entries.iter().zip(&answers) {
                let solutions = &entry.solutions[..k.min(entry.solutions.len())];
                tokens += solutions
                    .iter()
                    .map(|solution| solution.tokens)
                    .sum::<usize>();
                let ballots: Vec<Ballot> = (solutions.iter().zip(answers))
                    .map(|(solution, answer)| Ballot {
                        answer: answer.clone(),
                        weight: match choice {
                            "majority" => 1.0,
                            "majority-logprob" | "best-of-n-logprob" => solution.logprob.exp(),
                            _ => aggregate.of(&solution.scores),
                        },
                    })
                    .collect();
                let is_right = |index: usize| solutions[index].correct;
                correct += usize::from(match choice {
                    "pass" => (0..solutions.len()).any(is_right),
                    "best-of-n" | "best-of-n-logprob" => best(&ballots).is_some_and(is_right),
                    _ => vote(&ballots).is_some_and(is_right),
                });
            }
            let seconds = seconds(&|entry| {
                let solutions = entry.solutions.iter().take(k);
                solutions.map(|solution| solution.tokens).collect()
            });
            let row = row(choice, k, correct, tokens, seconds);
            rows.push(if k == n { whole(row) } else { row });
        }
    }
    rows
}
