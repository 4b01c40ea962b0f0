//! Searches that score each step: beam search, and diverse verifier tree search.
//!
//! A step ends with an empty line. The bookkeeping is that of Hugging Face's search-and-learn:
//!
//! ```text
//! beams = one empty beam
//! for each step:
//!     copy the beams, in turn, until there are n
//!     sample a step for each; the last step runs to the end of the text
//!     score all; beams whose text ended are finished
//!     of equal texts keep the first
//!     keep the n / width best of the others
//! the answer is that of the finished beam with the best score
//! ```
//!
//! 1. Copies of a beam are one request, so that their prefix is computed once.
//! 2. Of beams with the same score the later ones are kept, as in a stable sort whose last ones are
//!    kept; of finished beams with the same score the first is chosen.
//! 3. If there are fewer beams than should be kept, all of them are kept.
//! 4. A tree also ends with a step that has an answer in a box.
//!
//! SOURCE: beam_search.py (with `filter_duplicates`) and diverse_verifier_tree_search.py,
//! src/sal/search of huggingface/search-and-learn.

use std::collections::HashSet;
use std::thread;

use super::{Generator, SearchResult, Solution};
use crate::Error;
use crate::score::{Aggregate, Scorer};
use crate::server::{CompletionRequest, Continuation, MAX_SLOTS, StopReason};

/// The text that ends a step.
pub const STEP_END: &str = "\n\n";

/// The beginning of an answer, which ends a tree.
const BOX: &str = "boxed{";

/// The limits of a search.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Samples of which the best one is kept.
    pub width: usize,
    /// Most steps; the last one runs to the end of the text.
    pub max_steps: usize,
    /// Most tokens of a step. One that is longer ends its solution.
    pub max_step_tokens: usize,
    /// Most tokens of a solution.
    pub max_tokens: usize,
    /// A step does not end inside of brackets, of a formula or of a block of code.
    pub balanced: bool,
}

/// A search by steps.
pub struct Search<'a> {
    /// The model that writes steps.
    pub generator: &'a dyn Generator,
    /// The model or rule that scores steps.
    pub scorer: &'a dyn Scorer,
    /// The rule that makes one score of the scores of the steps.
    pub aggregate: Aggregate,
    /// The limits.
    pub limits: Limits,
    /// The question.
    pub question: &'a str,
    /// The prompt of the question.
    pub prompt: &'a str,
    /// Seed of the first sample.
    pub seed: u32,
}

impl Search<'_> {
    /// Beam search with `n` beams.
    ///
    /// # Errors
    /// An error of the server or of the scorer.
    pub fn beam(&self, n: usize) -> Result<SearchResult, Error> {
        let keep = n / self.limits.width;
        let (mut active, mut finished) = (vec![Solution::default()], Vec::new());
        let mut tokens = 0;
        for step in 0..self.limits.max_steps {
            let counts = copies(n, active.len());
            let samples = self.expand(&active, &counts, step, n)?;
            // The copies in turn: first, second, first, second.
            let rounds = counts.iter().copied().max().unwrap_or(0);
            let mut beams: Vec<Solution> = (0..rounds)
                .flat_map(|round| samples.iter().filter_map(move |some| some.get(round)))
                .cloned()
                .collect();
            tokens += last_tokens(&beams);
            self.score(&mut beams)?;
            let (ended, going): (Vec<_>, Vec<_>) = beams
                .into_iter()
                .partition(|beam| beam.stop != StopReason::Word);
            finished.extend(ended);
            if going.is_empty() {
                break;
            }
            active = self.best(unique(going), keep);
        }
        // The best solution first; of equal ones, the one that was finished first.
        finished.sort_by(|a, b| self.value(b).total_cmp(&self.value(a)));
        finished.truncate(n);
        Ok(SearchResult {
            solutions: finished,
            tokens,
        })
    }

    /// Diverse verifier tree search: `n / width` independent trees, each of which samples `width`
    /// steps and continues with the best. The solutions are those of the last step of each tree.
    ///
    /// # Errors
    /// An error of the server or of the scorer.
    pub fn trees(&self, n: usize) -> Result<SearchResult, Error> {
        let width = self.limits.width;
        let mut roots = vec![Solution::default(); n / width];
        // The samples of each tree's last step.
        let mut leaves: Vec<Vec<Solution>> = vec![Vec::new(); roots.len()];
        let mut growing: Vec<usize> = (0..roots.len()).collect();
        let mut tokens = 0;
        for step in 0..self.limits.max_steps {
            let active: Vec<Solution> = growing.iter().map(|tree| roots[*tree].clone()).collect();
            let samples = self.expand(&active, &vec![width; active.len()], step, n)?;
            for (tree, mut samples) in std::mem::take(&mut growing).into_iter().zip(samples) {
                tokens += last_tokens(&samples);
                self.score(&mut samples)?;
                let mut best = 0;
                for index in 1..samples.len() {
                    if self.value(&samples[index]) > self.value(&samples[best]) {
                        best = index;
                    }
                }
                roots[tree] = samples[best].clone();
                if roots[tree].stop == StopReason::Word && !roots[tree].text.contains(BOX) {
                    growing.push(tree);
                }
                leaves[tree] = samples;
            }
            if growing.is_empty() {
                break;
            }
        }
        Ok(SearchResult {
            solutions: leaves.into_iter().flatten().collect(),
            tokens,
        })
    }

    fn value(&self, solution: &Solution) -> f64 {
        let value = self.aggregate.of(&solution.scores);
        if value.is_nan() {
            f64::NEG_INFINITY
        } else {
            value
        }
    }

    fn score(&self, solutions: &mut [Solution]) -> Result<(), Error> {
        let all: Vec<&Solution> = solutions.iter().collect();
        let scores = self.scorer.score(self.question, &all)?;
        for (solution, scores) in solutions.iter_mut().zip(scores) {
            solution.scores = scores;
        }
        Ok(())
    }

    /// Keeps the best beams, in their order.
    fn best(&self, beams: Vec<Solution>, keep: usize) -> Vec<Solution> {
        let mut order: Vec<usize> = (0..beams.len()).collect();
        order.sort_by(|a, b| self.value(&beams[*a]).total_cmp(&self.value(&beams[*b])));
        let dropped = &order[..beams.len().saturating_sub(keep)];
        let mut index = 0;
        let mut kept = beams;
        kept.retain(|_| {
            index += 1;
            !dropped.contains(&(index - 1))
        });
        kept
    }

    /// Samples the next step of solutions, each in one request of `counts` completions, at most as
    /// many at the same time as the server has slots.
    fn expand(
        &self,
        active: &[Solution],
        counts: &[usize],
        step: usize,
        n: usize,
    ) -> Result<Vec<Vec<Solution>>, Error> {
        let is_last = step + 1 == self.limits.max_steps;
        let mut sample = step * n;
        let request = |(solution, count): (_, &usize)| {
            let seed = self.seed.wrapping_add(u32::try_from(sample).unwrap_or(0));
            sample += count;
            (solution, *count, seed)
        };
        let requests: Vec<(&Solution, usize, u32)> =
            active.iter().zip(counts).map(request).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| match worker.join() {
            Ok(samples) => samples,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut all = Vec::with_capacity(requests.len());
        for requests in requests.chunks(MAX_SLOTS) {
            let samples: Vec<Result<_, Error>> = thread::scope(|scope| {
                let start = |&(solution, count, seed)| {
                    scope.spawn(move || self.next(solution, count, seed, is_last))
                };
                let workers: Vec<_> = requests.iter().map(start).collect();
                workers.into_iter().map(join).collect()
            });
            all.extend(samples);
        }
        all.into_iter().collect()
    }

    /// Samples `count` next steps of one solution.
    fn next(
        &self,
        solution: &Solution,
        count: usize,
        seed: u32,
        is_last: bool,
    ) -> Result<Vec<Solution>, Error> {
        let left = self
            .limits
            .max_tokens
            .saturating_sub(solution.tokens())
            .max(1);
        let max_tokens = if is_last {
            left
        } else {
            left.min(self.limits.max_step_tokens)
        };
        let ask = |text: &str, n: usize, seed: u32, max_tokens: usize| {
            self.generator.complete(&CompletionRequest {
                prompt: &format!("{}{text}", self.prompt),
                n,
                seed,
                max_tokens,
                stop: (!is_last).then_some(STEP_END),
            })
        };
        let samples = ask(&solution.text, count, seed, max_tokens)?;
        let mut next = Vec::with_capacity(count);
        for (index, mut sample) in samples.into_iter().enumerate() {
            let mut again = seed.wrapping_add(u32::try_from(index).unwrap_or(0));
            while self.limits.balanced
                && sample.stop == StopReason::Word
                && !is_balanced(&sample.text)
            {
                if sample.tokens >= max_tokens {
                    sample.stop = StopReason::Length;
                    break;
                }
                sample.text += STEP_END;
                again = again.wrapping_mul(0x0100_0193) >> 1;
                let text = format!("{}{}", solution.text, sample.text);
                let before = sample.tokens;
                let more = ask(&text, 1, again, max_tokens - before)?;
                more.into_iter().for_each(|more| append(&mut sample, more));
                if sample.tokens == before {
                    // The server added nothing, so asking again would loop forever.
                    sample.stop = StopReason::Length;
                }
            }
            if sample.stop == StopReason::Word {
                sample.text += STEP_END;
            }
            let mut solution = solution.clone();
            solution.push(sample);
            next.push(solution);
        }
        Ok(next)
    }
}

/// Keeps the first of several equal texts.
fn unique(mut beams: Vec<Solution>) -> Vec<Solution> {
    let mut texts = HashSet::new();
    beams.retain(|beam| texts.insert(beam.text.clone()));
    beams
}

fn append(sample: &mut Continuation, more: Continuation) {
    sample.text += &more.text;
    sample.tokens += more.tokens;
    sample.listed += more.listed;
    sample.stop = more.stop;
    sample.logprob += more.logprob;
    sample.certainty += more.certainty;
}

/// Returns how many of `n` copies each of `beams` beams gets, in turn.
fn copies(n: usize, beams: usize) -> Vec<usize> {
    (0..beams)
        .map(|beam| n / beams + usize::from(beam < n % beams))
        .collect()
}

fn last_tokens(solutions: &[Solution]) -> usize {
    let last = |solution: &Solution| solution.steps.last().map_or(0, |step| step.tokens);
    solutions.iter().map(last).sum()
}

/// Returns `true` if a text ends outside of brackets, formulas and blocks of code.
fn is_balanced(text: &str) -> bool {
    // `\\[4pt]` ends a row and does not begin a formula. It is replaced by a space, so that the
    // text around it stays apart.
    let text = text.replace("\\\\", " ");
    let count = |what: &str| text.matches(what).count();
    let braces = |bare: &str, escaped: &str| count(bare) - count(escaped);
    braces("{", "\\{") <= braces("}", "\\}")
        && count("\\[") <= count("\\]")
        && count("\\(") <= count("\\)")
        && count("\\begin{") <= count("\\end{")
        && count("```").is_multiple_of(2)
        && count("$$").is_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::score::LogProbability;

    /// A generator that begins a formula, and ends it when it is asked to continue. Records the
    /// seeds of all samples.
    struct Formulas(Mutex<Vec<u32>>);

    impl Generator for Formulas {
        fn complete(&self, request: &CompletionRequest) -> Result<Vec<Continuation>, Error> {
            let seeds = (0..).map(|index| request.seed + index).take(request.n);
            self.0.lock().unwrap().extend(seeds);
            let is_open = request.prompt.contains("\\[");
            let one = Continuation {
                text: if is_open { "x\\]" } else { "\\[" }.into(),
                tokens: 1,
                listed: 1,
                stop: StopReason::Word,
                logprob: -1.0,
                certainty: 1.0,
            };
            Ok(vec![one; request.n])
        }
    }

    #[test]
    fn steps_that_go_on_have_seeds_that_differ() {
        let generator = Formulas(Mutex::default());
        let search = Search {
            generator: &generator,
            scorer: &LogProbability,
            aggregate: Aggregate::Last,
            limits: Limits {
                width: 4,
                max_steps: 2,
                max_step_tokens: 10,
                max_tokens: 10,
                balanced: true,
            },
            question: "",
            prompt: "",
            seed: 7,
        };
        let steps = search.next(&Solution::default(), 4, 7, false).unwrap();
        assert!(steps.iter().all(|step| step.text == "\\[\n\nx\\]\n\n"));
        let mut seeds = generator.0.into_inner().unwrap();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 8);
    }

    /// Begins a bracket for ever, without a token.
    struct Open;

    impl Generator for Open {
        fn complete(&self, request: &CompletionRequest) -> Result<Vec<Continuation>, Error> {
            let one = Continuation {
                text: "{".into(),
                tokens: 0,
                listed: 0,
                stop: StopReason::Word,
                logprob: 0.0,
                certainty: 0.0,
            };
            Ok(vec![one; request.n])
        }
    }

    #[test]
    fn a_step_without_tokens_does_not_go_on_for_ever() {
        let search = Search {
            generator: &Open,
            scorer: &LogProbability,
            aggregate: Aggregate::Last,
            limits: Limits {
                width: 1,
                max_steps: 2,
                max_step_tokens: 10,
                max_tokens: 10,
                balanced: true,
            },
            question: "",
            prompt: "",
            seed: 7,
        };
        // One tree more than a server may have slots.
        let found = search.trees(MAX_SLOTS + 1).unwrap().solutions;
        assert_eq!(found.len(), MAX_SLOTS + 1);
        let is_cut = |solution: &Solution| solution.stop == StopReason::Length;
        assert!(found.iter().all(is_cut), "{:?}", found[0]);
    }

    /// Ends every second step before its first token.
    struct Empty;

    impl Generator for Empty {
        fn complete(&self, request: &CompletionRequest) -> Result<Vec<Continuation>, Error> {
            let one = |index: usize| Continuation {
                text: if index.is_multiple_of(2) { "" } else { "x" }.into(),
                tokens: 1,
                listed: index % 2,
                stop: if request.stop.is_some() {
                    StopReason::Word
                } else {
                    StopReason::End
                },
                logprob: -((index % 2) as f64),
                certainty: (index % 2) as f64,
            };
            Ok((0..request.n).map(one).collect())
        }
    }

    #[test]
    fn an_empty_step_does_not_win() {
        let search = |aggregate| Search {
            generator: &Empty,
            scorer: &LogProbability,
            aggregate,
            limits: Limits {
                width: 2,
                max_steps: 2,
                max_step_tokens: 10,
                max_tokens: 10,
                balanced: false,
            },
            question: "",
            prompt: "",
            seed: 7,
        };
        for aggregate in [
            Aggregate::Last,
            Aggregate::Min,
            Aggregate::Product,
            Aggregate::Mean,
        ] {
            let search = search(aggregate);
            for found in [search.beam(2), search.trees(2)] {
                let solutions = found.unwrap().solutions;
                let is_full = |solution: &Solution| solution.text.starts_with('x');
                assert!(solutions.iter().all(is_full), "{aggregate}: {solutions:?}");
            }
        }
    }

    #[test]
    fn copies_are_given_in_turn() {
        assert_eq!(copies(8, 1), [8]);
        assert_eq!(copies(8, 3), [3, 3, 2]);
        assert_eq!(copies(4, 4), [1, 1, 1, 1]);
    }

    #[test]
    fn a_step_is_balanced_outside_of_formulas_and_code() {
        for text in [
            "so x = 1",
            "\\[x\\]",
            "$$x$$ and $$y$$",
            "```\na\n```",
            "\\{ 1 }",
            "{a}",
            "$a = 1$\\\\$b = 2$",
            "\\[\\begin{array}{c} a \\\\[4pt] b \\end{array}\\]",
        ] {
            assert!(is_balanced(text), "{text}");
        }
        for text in [
            "\\[x",
            "$$x",
            "```\na",
            "\\frac{1",
            "\\begin{align} a",
            "\\(x",
            "\\\\\\[x",
        ] {
            assert!(!is_balanced(text), "{text}");
        }
    }
}
