//! Measures the share of a model that a device computes. Nodes are counted while a graph is
//! computed. The result is logged once for a token, and once for a graph of many rows that no token
//! follows, such as an encoder's.
//!
//! ggml asks about every node of a graph before it computes the graph, and about every weight when
//! it loads a model. Then it hands over graphs: one for each range of nodes between nodes of other
//! devices. The device computes the nodes of a graph in one or more lists, because the CPU computes
//! others in between. Nodes that the device does not compute are never seen here, so the refused
//! questions count instead. Nodes of a list that the CPU computes faster are recorded when they are
//! left to it.

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

/// The share of one device in the current models.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// `true` while a context has no line about a token: questions are noted.
    notes: AtomicBool,
    /// `true` while the current graph is one of such a context: its nodes are counted.
    counts: AtomicBool,
    seen: Mutex<Seen>,
}

/// The number of a context of a device.
pub(super) type ContextId = u64;

#[derive(Debug, Default)]
struct Seen {
    /// Names of nodes that were refused since the last graph, by operation and reason.
    nodes: BTreeMap<(String, Refusal), BTreeSet<String>>,
    /// Weights that no memory of the device accepts, with the reason of the last question.
    weights: BTreeMap<String, Refusal>,
    /// `true` if these are the weights of the next model.
    loads_next: bool,
    /// `true` if a graph has begun, but none of its nodes has been seen.
    begins_graph: bool,
    contexts: BTreeMap<ContextId, Logged>,
    last_context: ContextId,
    /// The context of the current graph.
    owner: ContextId,
    round: Round,
}

/// The lines that a context had.
#[derive(Debug, Default)]
struct Logged {
    token: bool,
    rows: bool,
}

/// The mark of a list of nodes among those of a token.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ListId {
    /// The number of a graph.
    Graph(u64),
    /// The [`full_name`] of the first node of a list without a number: a part of a graph whose
    /// other parts the CPU computes, or of one that ggml divides among several devices.
    First(String),
}

/// Returns the names of a node and of its first operand. Two products of a layer may have one name,
/// as queries for the decoder's and for the encoder's keys.
fn full_name(operation: &Operation) -> String {
    let first = operation.src[0].as_ref().map_or("", |first| first.name);
    format!("{} {first}", operation.dst.name)
}

/// The lists of one computation of a graph.
#[derive(Debug, Default)]
struct Round {
    /// The lists so far. If one of them comes again, the next token has begun.
    ids: BTreeSet<ListId>,
    /// Graphs that ggml handed over.
    splits: usize,
    nodes: usize,
    /// Rows of the largest product with weights; 0 if there is none.
    rows: usize,
    /// `true` if a node writes data that outlives the graph, as a decoder's caches do; then tokens
    /// follow.
    writes_state: bool,
}

impl Round {
    /// Notes the rows of a product with weights, and a result that outlives the graph.
    fn see(&mut self, operation: &Operation) {
        self.writes_state |= operation.dst.role == Role::State;
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
    /// Notes the answer to a question about node `name`, and returns the line about the graph that
    /// was computed before.
    ///
    /// - `sources`: the names of its operands
    pub(super) fn answered<'a>(
        &self,
        device: &str,
        op: &str,
        name: &str,
        sources: impl Iterator<Item = &'a str>,
        refusal: Option<Refusal>,
    ) -> Option<String> {
        let notes = self.notes.load(Ordering::Relaxed);
        if !notes && !name.is_empty() {
            return None;
        }
        self.with(|seen| {
            if name.is_empty() {
                seen.answered_weight(!notes, sources, refusal);
                return None;
            }
            let mut line = None;
            if !seen.round.ids.is_empty() {
                line = self.end_round(seen, device);
                seen.nodes.clear();
            }
            if let Some(reason) = refusal {
                seen.refused(op, name, reason);
            }
            line
        })
    }

    /// Notes that ggml has handed over a graph of a context: a separate split. Returns the line
    /// about the graph before, if it was another context's.
    pub(super) fn begin_graph(&self, device: &str, context: ContextId) -> Option<String> {
        if !self.notes.load(Ordering::Relaxed) {
            return None;
        }
        self.with(|seen| {
            let mut line = None;
            if seen.owner != context {
                line = self.end_round(seen, device);
                seen.owner = context;
            }
            seen.begins_graph = true;
            let counts = seen
                .contexts
                .get(&context)
                .is_some_and(|logged| !logged.token);
            if !counts {
                // ggml's questions so far were about this graph, which is not counted.
                seen.nodes.clear();
            }
            self.counts.store(counts, Ordering::Relaxed);
            line
        })
    }

    /// Returns `true` if the nodes of the current graph are counted.
    pub(super) fn counts(&self) -> bool {
        self.counts.load(Ordering::Relaxed)
    }

    /// Records that the CPU is about to write data that outlives the current graph.
    pub(super) fn cpu_writes_state(&self) {
        self.with(|seen| seen.round.writes_state = true);
    }

    /// Notes a node that the CPU is about to compute in the device's place, and returns the line
    /// about the graph before.
    pub(super) fn left_to_cpu(&self, device: &str, operation: &Operation) -> Option<String> {
        if !self.counts() {
            return None;
        }
        let name = full_name(operation);
        let id = ListId::First(name.clone());
        self.with(|seen| {
            let line = self.line_before(seen, device, &id);
            if self.counts() {
                seen.count_graph();
                seen.round.ids.insert(id);
                seen.round.see(operation);
                seen.refused(operation.op.name(), &name, FEW_ROWS);
            }
            line
        })
    }

    /// Notes a list of nodes that the device has computed, and returns the line about the graph
    /// before.
    ///
    /// - `uid`: the graph's number; 0 if it has none
    pub(super) fn computed<'a>(
        &self,
        device: &str,
        uid: u64,
        operations: impl ExactSizeIterator<Item = &'a Operation<'a>> + Clone,
    ) -> Option<String> {
        if !self.counts() {
            return None;
        }
        let id = match operations.clone().next() {
            Some(first) if uid == 0 => ListId::First(full_name(first)),
            _ => ListId::Graph(uid),
        };
        self.with(|seen| {
            let line = self.line_before(seen, device, &id);
            if self.counts() {
                seen.count_graph();
                let round = &mut seen.round;
                round.ids.insert(id);
                round.nodes += operations.len();
                operations.for_each(|operation| round.see(operation));
            }
            line
        })
    }

    /// Begins a context: its lines are to be logged.
    pub(super) fn begin(&self) -> ContextId {
        self.with(|seen| {
            seen.nodes.clear();
            seen.loads_next = false;
            seen.last_context += 1;
            seen.contexts.insert(seen.last_context, Logged::default());
            self.notes.store(true, Ordering::Relaxed);
            seen.last_context
        })
    }

    /// Ends a context, and returns the line about its last graph, if there has been none about one
    /// of its kind.
    pub(super) fn end(&self, device: &str, context: ContextId) -> Option<String> {
        self.with(|seen| {
            let mut line = None;
            if seen.owner == context {
                // The context ends, so this graph is not followed by the graph of another token.
                seen.round.writes_state = false;
                line = self.end_round(seen, device);
            }
            seen.contexts.remove(&context);
            self.decide(seen);
            line
        })
    }

    /// Ends the current round if list `id` begins the next one, and returns the line about it.
    fn line_before(&self, seen: &mut Seen, device: &str, id: &ListId) -> Option<String> {
        let is_next = seen.round.ids.contains(id);
        is_next.then(|| self.end_round(seen, device)).flatten()
    }

    /// Ends the current round, and returns its line if it is to be logged.
    fn end_round(&self, seen: &mut Seen, device: &str) -> Option<String> {
        let unlogged = match (seen.contexts.get_mut(&seen.owner), &seen.round) {
            (Some(logged), Round { rows: 1, .. }) => Some(&mut logged.token),
            (
                Some(logged),
                Round {
                    rows: 2..,
                    writes_state: false,
                    ..
                },
            ) => Some(&mut logged.rows),
            _ => None,
        };
        let is_new = unlogged.is_some_and(|logged| !std::mem::replace(logged, true));
        let line = is_new.then(|| seen.line(device));
        seen.round = Round::default();
        self.decide(seen);
        line
    }

    /// Decides which nodes are recorded and counted after this.
    fn decide(&self, seen: &Seen) {
        let notes = seen.contexts.values().any(|logged| !logged.token);
        let counts = (seen.contexts.get(&seen.owner)).is_some_and(|logged| !logged.token);
        self.notes.store(notes, Ordering::Relaxed);
        self.counts.store(counts, Ordering::Relaxed);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Seen) -> T) -> T {
        f(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Seen {
    /// Counts the current graph once.
    fn count_graph(&mut self) {
        self.round.splits += usize::from(std::mem::take(&mut self.begins_graph));
    }

    /// Notes a node of the current graph that another device computes.
    fn refused(&mut self, op: &str, name: &str, reason: Refusal) {
        let names = self.nodes.entry((op.to_owned(), reason)).or_default();
        if names.len() < MAX_NAMES {
            names.insert(name.to_owned());
        }
    }

    /// Records an answer to the model loader, which asks about an unnamed operation for each memory
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

    fn line(&self, device: &str) -> String {
        let Round {
            nodes,
            splits,
            rows,
            ..
        } = self.round;
        let what = match rows {
            1 => "token".to_owned(),
            _ => format!("graph of {rows} rows"),
        };
        let noun = if splits == 1 { "split" } else { "splits" };
        let refused: usize = self.nodes.values().map(BTreeSet::len).sum();
        let all = nodes + refused;
        let mut line = format!("{device}: {nodes} of {all} nodes of a {what}, in {splits} {noun}");
        let mut reasons: Vec<_> = self.nodes.iter().collect();
        reasons.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
        for ((op, reason), names) in reasons.iter().take(MAX_REASONS) {
            // Writing to a string cannot fail.
            let _ = write!(line, "; not {} {op} ({reason})", names.len());
        }
        if let Some(rest) = reasons.len().checked_sub(MAX_REASONS + 1) {
            let _ = write!(line, "; and {} more reasons", rest + 1);
        }
        // Weights outside the device need no explanation if they do not cut the graph.
        let is_cut = refused > 0 || splits > 1;
        if let Some((name, reason)) = self.weights.first_key_value().filter(|_| is_cut) {
            let count = self.weights.len();
            let _ = write!(line, "; {count} weights elsewhere: {name} ({reason})");
        }
        line
    }
}

#[cfg(test)]
mod tests;
