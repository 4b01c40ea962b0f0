//! All problems of a file, several at a time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::Error;
use crate::answer::{Answer, extract};
use crate::choose::{Ballot, best, vote};
use crate::journal::{Journal, Record, Solved};
use crate::problem::Problem;
use crate::score::{Aggregate, LogProbability, Scorer};
use crate::search::tree::{Limits, Search};
use crate::search::{Generator, SearchResult, Solution, sample};

/// A way to find and to choose solutions.
#[derive(Clone, Copy, Debug)]
pub enum SearchMethod {
    /// Independent samples, and the answer that most of them have.
    Majority,
    /// Independent samples, and the one with the best score.
    BestOfN,
    /// Beam search by steps.
    Beam(Limits),
    /// Diverse verifier tree search.
    Trees(Limits),
}

/// The common part of all problems of a run.
pub struct RunPlan<'a> {
    /// The method.
    pub method: SearchMethod,
    /// Number of solutions.
    pub n: usize,
    /// Most tokens of a solution.
    pub max_tokens: usize,
    /// Seed of the run.
    pub seed: u32,
    /// Samples text.
    pub generator: &'a dyn Generator,
    /// Makes the prompt of a question.
    pub prompt: &'a (dyn Fn(&str) -> Result<String, Error> + Sync),
    /// Scores solutions.
    pub scorer: Option<&'a dyn Scorer>,
    /// The rule that makes one score of the scores of the steps.
    pub aggregate: Aggregate,
    /// Returns the joules since its last call, if they were measured.
    pub energy: Option<&'a (dyn Fn() -> Option<f64> + Sync)>,
}

/// Solves problems, `workers` at a time, and writes each into the journal when it is done.
///
/// # Errors
/// The first error. Problems that are under way are finished if possible.
pub fn run(
    plan: &RunPlan,
    problems: &[Problem],
    workers: usize,
    journal: &mut Journal,
    done: &(dyn Fn(&Solved) + Sync),
) -> Result<(), Error> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let journal = Mutex::new(journal);
    let work = || -> Result<(), Error> {
        while !failed.load(Ordering::Relaxed) {
            let Some(problem) = problems.get(next.fetch_add(1, Ordering::Relaxed)) else {
                break;
            };
            let mut entry = solve(plan, problem)?;
            let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
            entry.joules = plan.energy.and_then(|energy| energy());
            journal.append(&entry)?;
            done(&entry);
        }
        Ok(())
    };
    let work = || work().inspect_err(|_| failed.store(true, Ordering::Relaxed));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers.clamp(1, problems.len().max(1)))
            .map(|_| scope.spawn(work))
            .collect();
        let mut result = Ok(());
        for worker in workers {
            match worker.join() {
                Ok(done) => result = result.and(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        result
    })
}

/// Solves one problem.
///
/// # Errors
/// An error of the server or of the scorer.
pub fn solve(plan: &RunPlan, problem: &Problem) -> Result<Solved, Error> {
    let found = search(plan, problem)?;
    let answers: Vec<Option<String>> = (found.solutions.iter())
        .map(|solution| extract(&solution.text))
        .collect();
    let ballots: Vec<Ballot> = (found.solutions.iter().zip(&answers))
        .map(|(solution, answer)| Ballot {
            answer: answer.as_deref().map(Answer::parse),
            weight: match plan.method {
                SearchMethod::Majority => 1.0,
                _ => plan.aggregate.of(&solution.scores),
            },
        })
        .collect();
    let chosen = match plan.method {
        SearchMethod::Majority => vote(&ballots),
        _ => best(&ballots),
    };
    let expected = Answer::parse(&problem.answer);
    let is_right = |index: usize| {
        let answer = ballots[index].answer.as_ref();
        answer.is_some_and(|answer| answer.same(&expected))
    };
    let records = (found.solutions.into_iter().enumerate())
        .map(|(index, solution)| Record {
            answer: answers[index].clone(),
            correct: is_right(index),
            tokens: solution.tokens(),
            logprob: solution.mean_logprob(),
            cut: solution.stop == crate::server::StopReason::Length,
            scores: solution.scores,
            text: solution.text,
        })
        .collect();
    Ok(Solved {
        id: problem.id.clone(),
        question_hash: Some(problem.question_hash()),
        expected: problem.answer.clone(),
        chosen: chosen.and_then(|index| answers[index].clone()),
        correct: chosen.is_some_and(is_right),
        tokens: found.tokens,
        joules: None,
        solutions: records,
    })
}

fn search(plan: &RunPlan, problem: &Problem) -> Result<SearchResult, Error> {
    let prompt = &(plan.prompt)(&problem.question)?;
    let seed = seed_of(plan.seed, &problem.id);
    if let SearchMethod::Beam(limits) | SearchMethod::Trees(limits) = plan.method {
        let search = Search {
            generator: plan.generator,
            scorer: plan.scorer.unwrap_or(&LogProbability),
            aggregate: plan.aggregate,
            limits,
            question: &problem.question,
            prompt,
            seed,
        };
        return match plan.method {
            SearchMethod::Trees(_) => search.trees(plan.n),
            _ => search.beam(plan.n),
        };
    }
    let mut found = sample(plan.generator, prompt, plan.n, plan.max_tokens, seed)?;
    if let Some(scorer) = plan.scorer {
        let solutions: Vec<&Solution> = found.solutions.iter().collect();
        let scores = scorer.score(&problem.question, &solutions)?;
        for (solution, scores) in found.solutions.iter_mut().zip(scores) {
            solution.scores = scores;
        }
    }
    Ok(found)
}

/// Returns the seed of a problem's first sample, which does not depend on the problems before it.
/// The seeds of its other samples are the next numbers.
// SOURCE: FNV-1a, 32 bits, Fowler, Noll and Vo.
fn seed_of(seed: u32, id: &str) -> u32 {
    let mut hash = 0x811c_9dc5_u32 ^ seed;
    for byte in seed.to_le_bytes().into_iter().chain(id.bytes()) {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    // llama-server takes the largest number as a request for a random seed. Halving leaves room for
    // the seeds of the other samples below it.
    hash >> 1
}
