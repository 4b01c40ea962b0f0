//! The choice among solutions: votes, and the best of N.

use crate::answer::Answer;

/// A solution as a vote sees it.
#[derive(Clone, Debug)]
pub struct Ballot {
    /// The answer of the solution, if it has one.
    pub answer: Option<Answer>,
    /// The weight or score of the solution.
    pub weight: f64,
}

/// Returns the index of the first solution that has the answer with the most weight.
///
/// If answers have the same weight, the first one wins. Solutions without an answer do not vote,
/// and a weight that is not a number counts as 0; `None` if no solution has an answer.
#[must_use]
pub fn vote(ballots: &[Ballot]) -> Option<usize> {
    let mut groups: Vec<(usize, &Answer, f64)> = Vec::new();
    for (index, ballot) in ballots.iter().enumerate() {
        let Some(answer) = &ballot.answer else {
            continue;
        };
        let weight = if ballot.weight.is_nan() {
            0.0
        } else {
            ballot.weight
        };
        match groups.iter_mut().find(|(_, first, _)| first.same(answer)) {
            Some((.., sum)) => *sum += weight,
            None => groups.push((index, answer, weight)),
        }
    }
    first_largest(groups.iter().map(|(index, _, weight)| (*index, *weight)))
}

/// Returns the index of the first solution with the largest weight.
#[must_use]
pub fn best(ballots: &[Ballot]) -> Option<usize> {
    first_largest(ballots.iter().map(|ballot| ballot.weight).enumerate())
}

/// Returns the index of the first largest weight. A weight that is not a number is never the
/// largest, unless all are.
fn first_largest(weights: impl Iterator<Item = (usize, f64)>) -> Option<usize> {
    let mut found: Option<(usize, f64)> = None;
    for (index, weight) in weights {
        let weight = if weight.is_nan() {
            f64::NEG_INFINITY
        } else {
            weight
        };
        if found.is_none_or(|(_, most)| weight > most) {
            found = Some((index, weight));
        }
    }
    found.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_that_is_no_number_leaves_its_group_the_others() {
        let ballot = |answer: &str, weight| Ballot {
            answer: Some(Answer::parse(answer)),
            weight,
        };
        let ballots = [ballot("1", f64::NAN), ballot("2", 0.5), ballot("1", 1.0)];
        assert_eq!(vote(&ballots), Some(0));
        assert_eq!(vote(&ballots[..2]), Some(1));
        assert_eq!(vote(&ballots[..1]), Some(0));
    }
}
