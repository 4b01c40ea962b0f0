//! The share of a model that a device computes: counted while a token is computed, told once.
//!
//! ggml asks about every node of a graph before it computes the graph, and about every weight when
//! it loads a model. Then it hands over graphs: one for each stretch of nodes between nodes of
//! other devices. The device computes the nodes of a graph in one or more lists, because the CPU
//! computes others in between. Nodes that the device does not compute are never seen here, so the
//! refused questions stand for them. Nodes of a list that the CPU computes faster are noted as
//! they are left to it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::graph::{Op, Operation, Refusal, Role};

/// The reason of nodes that a device could compute and that the CPU computes.
const FEW_ROWS: Refusal = "the CPU is faster with so few rows";

/// Most reasons that a line has.
const MAX_REASONS: usize = 4;
/// Most names that are kept for one reason, so that a program without an end fills no memory.
const MAX_NAMES: usize = 4096;

/// The share of one device in the model at hand.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    told: AtomicBool,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Names of nodes that were refused since the last graph, by operation and reason.
    nodes: BTreeMap<(String, Refusal), BTreeSet<String>>,
    /// Weights that no memory of the device takes, with the reason of the last question.
    weights: BTreeMap<String, Refusal>,
    /// `true` if these are the weights of the next model.
    loads_next: bool,
    /// `true` if a graph has begun of which no node has been seen.
    begins_graph: bool,
    round: Round,
}

/// The mark of a list of nodes among those of a token.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ListId {
    /// The number of a graph.
    Graph(u64),
    /// The [`full_name`] of the first node of a list without a number: a part of a graph whose other parts
    /// the CPU computes, or of one that ggml shares out over several devices.
    First(String),
}

/// Returns the names of a node and of its first operand. Two products of a layer may have one name, as queries for the decoder's
/// and for the encoder's keys.
fn full_name(operation: &Operation) -> String {
    let first = operation.src[0].as_ref().map_or("", |first| first.name);
    format!("{} {first}", operation.dst.name)
}

/// The lists of one computation of a graph.
#[derive(Debug, Default)]
struct Round {
    /// The lists so far. One that comes again begins the next token.
    ids: BTreeSet<ListId>,
    /// Graphs that ggml handed over.
    splits: usize,
    nodes: usize,
    /// Rows of the largest product with weights.
    rows: usize,
}

impl Round {
    /// Returns `true` if this is the computation of one token.
    fn is_token(&self) -> bool {
        self.rows == 1
    }

    /// Counts the rows of a product with weights.
    fn see(&mut self, operation: &Operation) {
        if let (Op::MulMat | Op::MulMatId, Some(weights)) = (operation.op, &operation.src[0])
            && weights.role == Role::Weights
        {
            let rows = match operation.op {
                Op::MulMat => operation.dst.shape.ne[1],
                _ => operation.dst.shape.ne[2],
            };
            self.rows = self.rows.max(rows);
        }
    }
}

impl Coverage {
    /// Notes the answer to a question about node `name`.
    ///
    /// - `sources`: the names of its operands
    pub(super) fn answered<'a>(
        &self,
        op: &str,
        name: &str,
        sources: impl Iterator<Item = &'a str>,
        refusal: Option<Refusal>,
    ) {
        let is_told = self.told.load(Ordering::Relaxed);
        if is_told && !name.is_empty() {
            return;
        }
        self.with(|seen| {
            if name.is_empty() {
                return seen.answered_weight(is_told, sources, refusal);
            }
            if !seen.round.ids.is_empty() {
                seen.nodes.clear();
                seen.round = Round::default();
            }
            if let Some(reason) = refusal {
                seen.refused(op, name, reason);
            }
        });
    }

    /// Notes that ggml has handed over a graph: a split of its own.
    pub(super) fn begin_graph(&self) {
        if !self.is_told() {
            self.with(|seen| seen.begins_graph = true);
        }
    }

    /// Returns `true` if the line about the model was told.
    pub(super) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// Notes a node that the CPU is about to compute in the device's place, and returns the line about the model when the graph of
    /// a token is done.
    pub(super) fn left_to_cpu(&self, device: &str, operation: &Operation) -> Option<String> {
        if self.is_told() {
            return None;
        }
        let name = full_name(operation);
        let id = ListId::First(name.clone());
        self.with(|seen| {
            let line = seen.line_before(device, &id);
            if line.is_some() {
                self.told.store(true, Ordering::Relaxed);
                return line;
            }
            seen.count_graph();
            seen.round.ids.insert(id);
            seen.round.see(operation);
            seen.refused(operation.op.name(), &name, FEW_ROWS);
            None
        })
    }

    /// Notes a list of nodes that the device has computed, and returns the line about the model
    /// when the graph of a token is done.
    ///
    /// - `uid`: the graph's number; 0 if it has none
    pub(super) fn computed<'a>(
        &self,
        device: &str,
        uid: u64,
        operations: impl ExactSizeIterator<Item = &'a Operation<'a>> + Clone,
    ) -> Option<String> {
        if self.is_told() {
            return None;
        }
        let id = match operations.clone().next() {
            Some(first) if uid == 0 => ListId::First(full_name(first)),
            _ => ListId::Graph(uid),
        };
        self.with(|seen| {
            let line = seen.line_before(device, &id);
            if line.is_some() {
                self.told.store(true, Ordering::Relaxed);
                return line;
            }
            seen.count_graph();
            let round = &mut seen.round;
            round.ids.insert(id);
            round.nodes += operations.len();
            operations.for_each(|operation| round.see(operation));
            None
        })
    }

    /// Returns the line about the model if a token has been computed, and nothing has been told.
    pub(super) fn ended(&self, device: &str) -> Option<String> {
        if self.is_told() {
            return None;
        }
        let line = self.with(|seen| seen.round.is_token().then(|| seen.line(device)));
        self.told.store(line.is_some(), Ordering::Relaxed);
        line
    }

    /// Begins a model or a context: its line is to be told.
    pub(super) fn begin(&self) {
        self.with(|seen| {
            seen.round = Round::default();
            seen.loads_next = false;
        });
        self.told.store(false, Ordering::Relaxed);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Seen) -> T) -> T {
        f(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Seen {
    /// Counts the graph at hand once.
    fn count_graph(&mut self) {
        self.round.splits += usize::from(std::mem::take(&mut self.begins_graph));
    }

    /// Notes a node of the graph at hand that another device computes.
    fn refused(&mut self, op: &str, name: &str, reason: Refusal) {
        let names = self.nodes.entry((op.to_owned(), reason)).or_default();
        if names.len() < MAX_NAMES {
            names.insert(name.to_owned());
        }
    }

    /// Notes the answer to the loader, which asks about an operation without a name for each memory
    /// that a weight could be in.
    fn answered_weight<'a>(
        &mut self,
        is_told: bool,
        mut sources: impl Iterator<Item = &'a str>,
        refusal: Option<Refusal>,
    ) {
        if is_told && !self.loads_next {
            self.weights.clear();
            self.loads_next = true;
        }
        let Some(name) = sources.find(|name| !name.is_empty()) else {
            return;
        };
        match refusal {
            Some(reason) if self.weights.len() < MAX_NAMES => {
                self.weights.insert(name.to_owned(), reason);
            }
            Some(_) => {}
            None => {
                self.weights.remove(name);
            }
        }
    }

    /// Returns the line if list `id` is the first one after the graph of a token.
    fn line_before(&mut self, device: &str, id: &ListId) -> Option<String> {
        if !self.round.ids.contains(id) {
            return None;
        }
        let line = self.round.is_token().then(|| self.line(device));
        self.round = Round::default();
        line
    }

    fn line(&self, device: &str) -> String {
        let Round { nodes, splits, .. } = self.round;
        let noun = if splits == 1 { "split" } else { "splits" };
        let refused: usize = self.nodes.values().map(BTreeSet::len).sum();
        let all = nodes + refused;
        let mut line = format!("{device}: {nodes} of {all} nodes of a token, in {splits} {noun}");
        let mut reasons: Vec<_> = self.nodes.iter().collect();
        reasons.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
        for ((op, reason), names) in reasons.iter().take(MAX_REASONS) {
            // Writing to a string cannot fail.
            let _ = write!(line, "; not {} {op} ({reason})", names.len());
        }
        if let Some(rest) = reasons.len().checked_sub(MAX_REASONS + 1) {
            let _ = write!(line, "; and {} more reasons", rest + 1);
        }
        // A weight elsewhere that cuts nothing has nothing to explain.
        let is_cut = refused > 0 || splits > 1;
        if let Some((name, reason)) = self.weights.first_key_value().filter(|_| is_cut) {
            let count = self.weights.len();
            let _ = write!(line, "; {count} weights elsewhere: {name} ({reason})");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{PARAMS, Place, Tensor, sources};
    use crate::tensor::{DType, Shape};

    fn tensor(name: &str, role: Role, ne: [usize; 4]) -> Tensor<'_> {
        Tensor {
            name,
            dtype: DType::F32,
            format: None,
            shape: Shape {
                ne,
                nb: [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]],
            },
            place: Place::Device,
            role,
            memory: None,
            packed_offset: 0,
            dequantize: None,
        }
    }

    fn product<'a>(name: &'a str, weights: &'a str, rows: usize) -> Operation<'a> {
        Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: tensor(name, Role::Result, [8, rows, 1, 1]),
            src: sources(&[
                tensor(weights, Role::Weights, [4, 8, 1, 1]),
                tensor("x", Role::Result, [4, rows, 1, 1]),
            ]),
        }
    }

    fn answer(coverage: &Coverage, op: &str, operation: &Operation, refusal: Option<Refusal>) {
        let sources = operation.src.iter().flatten().map(|source| source.name);
        coverage.answered(op, operation.dst.name, sources, refusal);
    }

    fn compute(coverage: &Coverage, uid: u64, operations: &[Operation]) -> Option<String> {
        coverage.begin_graph();
        coverage.computed("HEX0", uid, operations.iter())
    }

    #[test]
    fn the_line_counts_a_token_and_names_what_other_devices_compute() {
        let coverage = Coverage::default();
        // The loader: two memories for one weight, none for another.
        answer(&coverage, "MUL_MAT", &product("", "a", 1), Some("packed"));
        answer(&coverage, "MUL_MAT", &product("", "a", 1), None);
        answer(
            &coverage,
            "MUL_MAT",
            &product("", "b", 1),
            Some("too large"),
        );
        // A prompt, which does not count.
        answer(
            &coverage,
            "FFT",
            &product("prompt", "a", 7),
            Some("unknown"),
        );
        assert_eq!(compute(&coverage, 1, &[product("p", "a", 7)]), None);
        // Two tokens; questions come several times, and a graph that is computed again has none.
        for name in ["one", "two", "one"] {
            answer(&coverage, "FFT", &product(name, "a", 1), Some("unknown"));
        }
        answer(&coverage, "MUL_MAT", &product("yes", "a", 1), None);
        let list = [product("k", "a", 1), product("l", "a", 1)];
        assert_eq!(compute(&coverage, 2, &list), None);
        assert_eq!(compute(&coverage, 3, &list[..1]), None);
        let line = compute(&coverage, 2, &list);
        let want = "HEX0: 3 of 5 nodes of a token, in 2 splits; not 2 FFT (unknown); \
                    1 weights elsewhere: b (too large)";
        assert_eq!(line.as_deref(), Some(want));
        assert_eq!(compute(&coverage, 2, &list), None, "told once");
        assert_eq!(coverage.ended("HEX0"), None, "told once");
    }

    /// They counted neither as the device's nor as others', and a token of nothing else had no line.
    #[test]
    fn nodes_that_the_cpu_computes_for_few_rows_are_told() {
        let coverage = Coverage::default();
        let [product, last] = [product("k", "a", 1), product("l", "a", 1)];
        answer(&coverage, "MUL_MAT", &product, None);
        assert_eq!(coverage.left_to_cpu("NPU", &product), None);
        assert_eq!(compute(&coverage, 0, std::slice::from_ref(&last)), None);
        let line = coverage.left_to_cpu("NPU", &product);
        let want = "NPU: 1 of 2 nodes of a token, in 1 split; not 1 MUL_MAT (the CPU is faster with so few rows)";
        assert_eq!(line.as_deref(), Some(want));
        assert_eq!(coverage.left_to_cpu("NPU", &product), None, "told once");

        let coverage = Coverage::default();
        assert_eq!(coverage.left_to_cpu("NPU", &product), None);
        assert_eq!(coverage.left_to_cpu("NPU", &last), None);
        let same_name = self::product("k", "b", 1);
        assert_eq!(coverage.left_to_cpu("NPU", &same_name), None);
        let want = "NPU: 0 of 3 nodes of a token, in 0 splits; not 3 MUL_MAT (the CPU is faster with so few rows)";
        assert_eq!(coverage.ended("NPU").as_deref(), Some(want));
    }

    #[test]
    fn a_single_token_is_told_at_the_end_and_a_prompt_never() {
        let coverage = Coverage::default();
        assert_eq!(compute(&coverage, 1, &[product("p", "a", 7)]), None);
        assert_eq!(coverage.ended("HEX0"), None);
        assert_eq!(compute(&coverage, 1, &[product("p", "a", 7)]), None);
        answer(&coverage, "MUL_MAT", &product("k", "a", 1), None);
        assert_eq!(compute(&coverage, 2, &[product("k", "a", 1)]), None);
        let line = coverage.ended("HEX0");
        let want = "HEX0: 1 of 1 nodes of a token, in 1 split";
        assert_eq!(line.as_deref(), Some(want));
        // The next model is loaded, then computed; its weight is named only if it cuts the token.
        answer(&coverage, "MUL_MAT", &product("", "c", 1), Some("packed"));
        coverage.begin();
        assert_eq!(coverage.ended("HEX0"), None, "another model");
        assert_eq!(compute(&coverage, 3, &[product("k", "a", 1)]), None);
        assert_eq!(coverage.ended("HEX0").as_deref(), Some(want));
        coverage.begin();
        assert_eq!(compute(&coverage, 4, &[product("k", "a", 1)]), None);
        assert_eq!(compute(&coverage, 5, &[product("l", "a", 1)]), None);
        let line = coverage.ended("HEX0").unwrap();
        assert!(
            line.ends_with("in 2 splits; 1 weights elsewhere: c (packed)"),
            "{line}"
        );
    }

    #[test]
    fn parts_of_a_graph_without_a_number_are_one_token() {
        let coverage = Coverage::default();
        let parts = ["q", "k", "out"];
        for rows in [7, 1] {
            for part in parts {
                assert_eq!(compute(&coverage, 0, &[product(part, "a", rows)]), None);
            }
        }
        let line = compute(&coverage, 0, &[product("q", "a", 1)]);
        let want = "HEX0: 3 of 3 nodes of a token, in 3 splits";
        assert_eq!(line.as_deref(), Some(want));
    }

    /// Asks about nodes that are refused, computes a token in one list, and returns the line.
    fn line_of(coverage: &Coverage, refused: &[(&str, Refusal)]) -> String {
        coverage.begin();
        for (name, reason) in refused {
            answer(coverage, "FFT", &product(name, "a", 1), Some(reason));
        }
        assert_eq!(compute(coverage, 1, &[product("k", "a", 1)]), None);
        coverage.ended("HEX0").unwrap()
    }

    #[test]
    fn a_line_has_four_reasons_and_the_number_of_others() {
        let reasons = ["a", "b", "c", "d", "e", "f"].map(|reason| (reason, reason));
        for (count, end) in [
            (4, "not 1 FFT (d)"),
            (5, "and 1 more reasons"),
            (6, "and 2 more reasons"),
        ] {
            let line = line_of(&Coverage::default(), &reasons[..count]);
            assert!(line.ends_with(end), "{line}");
        }
    }

    #[test]
    fn names_have_a_limit() {
        let coverage = Coverage::default();
        let names: Vec<_> = (0..MAX_NAMES + 3).map(|i| i.to_string()).collect();
        for name in &names {
            answer(&coverage, "MUL_MAT", &product("", name, 1), Some("packed"));
        }
        let nodes: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), "unknown"))
            .collect();
        let want = format!(
            "HEX0: 1 of {} nodes of a token, in 1 split; not {MAX_NAMES} FFT (unknown); \
             {MAX_NAMES} weights elsewhere: 0 (packed)",
            MAX_NAMES + 1
        );
        assert_eq!(line_of(&coverage, &nodes), want);
    }

    #[test]
    fn weights_of_the_last_model_are_forgotten_when_another_is_loaded() {
        let coverage = Coverage::default();
        for (weights, end) in [
            (["a", "b"], "2 weights elsewhere: a"),
            (["c", "d"], "2 weights elsewhere: c"),
        ] {
            for name in weights {
                answer(&coverage, "MUL_MAT", &product("", name, 1), Some("packed"));
            }
            let line = line_of(&coverage, &[("x", "unknown")]);
            assert!(line.ends_with(&format!("{end} (packed)")), "{line}");
        }
    }
}
