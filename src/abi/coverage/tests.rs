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

/// A coverage with one context.
fn one() -> Coverage {
    let coverage = Coverage::default();
    assert_eq!(coverage.begin(), CONTEXT);
    coverage
}

const CONTEXT: ContextId = 1;

/// A node by which a decoder's graph writes its caches.
fn write(rows: usize) -> Operation<'static> {
    let mut write = product("cache", "a", rows);
    write.dst.role = Role::State;
    write
}

fn ask(
    coverage: &Coverage,
    op: &str,
    operation: &Operation,
    refusal: Option<Refusal>,
) -> Option<String> {
    let sources = operation.src.iter().flatten().map(|source| source.name);
    coverage.answered("HEX0", op, operation.dst.name, sources, refusal)
}

fn answer(coverage: &Coverage, op: &str, operation: &Operation, refusal: Option<Refusal>) {
    assert_eq!(ask(coverage, op, operation, refusal), None);
}

fn compute(coverage: &Coverage, uid: u64, operations: &[Operation]) -> Option<String> {
    compute_in(CONTEXT, coverage, uid, operations)
}

fn compute_in(
    context: ContextId,
    coverage: &Coverage,
    uid: u64,
    operations: &[Operation],
) -> Option<String> {
    let line = coverage.begin_graph("HEX0", context);
    line.or(coverage.computed("HEX0", uid, operations.iter()))
}

#[test]
fn the_line_counts_a_token_and_names_what_other_devices_compute() {
    let coverage = one();
    // The model loader asks: one weight is in two memories, the other in none.
    answer(&coverage, "MUL_MAT", &product("", "a", 1), Some("packed"));
    answer(&coverage, "MUL_MAT", &product("", "a", 1), None);
    answer(
        &coverage,
        "MUL_MAT",
        &product("", "b", 1),
        Some("too large"),
    );
    // A prompt is not counted.
    answer(
        &coverage,
        "FFT",
        &product("prompt", "a", 7),
        Some("unknown"),
    );
    assert_eq!(
        compute(&coverage, 1, &[product("p", "a", 7), write(7)]),
        None
    );
    // Two tokens: ggml asks several times about each, and does not ask about a repeated graph.
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
    assert_eq!(compute(&coverage, 2, &list), None, "logged once");
    assert_eq!(coverage.end("HEX0", CONTEXT), None, "logged once");
}

/// Regression: such nodes were counted neither as the device's nor as the CPU's, and a token that
/// had nothing else got no line.
#[test]
fn nodes_that_the_cpu_computes_for_few_rows_are_told() {
    let coverage = one();
    assert_eq!(coverage.begin_graph("NPU", CONTEXT), None);
    let [product, last] = [product("k", "a", 1), product("l", "a", 1)];
    answer(&coverage, "MUL_MAT", &product, None);
    assert_eq!(coverage.left_to_cpu("NPU", &product), None);
    assert_eq!(
        coverage.computed("NPU", 0, std::slice::from_ref(&last).iter()),
        None
    );
    let line = coverage.left_to_cpu("NPU", &product);
    let want = "NPU: 1 of 2 nodes of a token, in 1 split; not 1 MUL_MAT (the CPU is faster with so few rows)";
    assert_eq!(line.as_deref(), Some(want));
    assert_eq!(coverage.left_to_cpu("NPU", &product), None, "logged once");

    let coverage = one();
    assert_eq!(coverage.begin_graph("NPU", CONTEXT), None);
    assert_eq!(coverage.left_to_cpu("NPU", &product), None);
    assert_eq!(coverage.left_to_cpu("NPU", &last), None);
    let same_name = self::product("k", "b", 1);
    assert_eq!(coverage.left_to_cpu("NPU", &same_name), None);
    let want = "NPU: 0 of 3 nodes of a token, in 1 split; not 3 MUL_MAT (the CPU is faster with so few rows)";
    assert_eq!(coverage.end("NPU", CONTEXT).as_deref(), Some(want));
}

#[test]
fn a_single_token_is_told_when_its_context_ends() {
    let coverage = one();
    assert_eq!(
        compute(&coverage, 1, &[product("p", "a", 7), write(7)]),
        None
    );
    answer(&coverage, "MUL_MAT", &product("k", "a", 1), None);
    assert_eq!(compute(&coverage, 2, &[product("k", "a", 1)]), None);
    let line = coverage.end("HEX0", CONTEXT);
    let want = "HEX0: 1 of 1 nodes of a token, in 1 split";
    assert_eq!(line.as_deref(), Some(want));
    // The next model is loaded, then computed. Its weight is named only if it cuts the graph of a
    // token.
    answer(&coverage, "MUL_MAT", &product("", "c", 1), Some("packed"));
    let second = coverage.begin();
    assert_eq!(coverage.end("HEX0", second), None, "nothing was computed");
    let third = coverage.begin();
    let token = [product("k", "a", 1)];
    assert_eq!(compute_in(third, &coverage, 3, &token), None);
    assert_eq!(coverage.end("HEX0", third).as_deref(), Some(want));
    let last = coverage.begin();
    assert_eq!(compute_in(last, &coverage, 4, &token), None);
    let other = [product("l", "a", 1)];
    assert_eq!(compute_in(last, &coverage, 5, &other), None);
    let line = coverage.end("HEX0", last).unwrap();
    assert!(
        line.ends_with("in 2 splits; 1 weights elsewhere: c (packed)"),
        "{line}"
    );
}

/// An encoder gets a line, too, although no token comes after its graph.
#[test]
fn a_graph_of_many_rows_that_writes_nothing_is_told() {
    let coverage = one();
    let encoder = [product("p", "a", 7), product("q", "a", 7)];
    answer(&coverage, "FFT", &product("f", "a", 7), Some("unknown"));
    assert_eq!(compute(&coverage, 1, &encoder), None);
    let line = ask(&coverage, "MUL_MAT", &encoder[0], None);
    let want = "HEX0: 2 of 3 nodes of a graph of 7 rows, in 1 split; not 1 FFT (unknown)";
    assert_eq!(line.as_deref(), Some(want));
    assert_eq!(compute(&coverage, 2, &encoder), None);
    assert_eq!(compute(&coverage, 2, &encoder), None, "logged once");
    // A token of the second model's decoder gets a line of its kind.
    answer(&coverage, "MUL_MAT", &product("k", "a", 1), None);
    assert_eq!(compute(&coverage, 3, &[product("k", "a", 1)]), None);
    assert!(compute(&coverage, 3, &[product("k", "a", 1)]).is_some());
    assert_eq!(coverage.end("HEX0", CONTEXT), None, "logged once");
}

#[test]
fn a_prompt_is_told_only_if_its_context_ends_without_a_token() {
    for cpu_writes in [false, true] {
        let coverage = one();
        let prompt = [product("p", "a", 7), write(7)];
        for uid in [1, 1, 2] {
            let nodes = if cpu_writes { &prompt[..1] } else { &prompt };
            assert_eq!(compute(&coverage, uid, nodes), None);
            if cpu_writes {
                coverage.cpu_writes_state();
            }
            answer(&coverage, "MUL_MAT", &prompt[0], None);
        }
        assert_eq!(compute(&coverage, 3, &prompt), None);
        let line = coverage.end("HEX0", CONTEXT);
        let want = "HEX0: 2 of 2 nodes of a graph of 7 rows, in 1 split";
        assert_eq!(line.as_deref(), Some(want));
    }
}

/// A server's image comes after the first tokens of its text model.
#[test]
fn each_context_has_its_lines() {
    let coverage = one();
    let encoder = coverage.begin();
    let token = [product("k", "a", 1)];
    for is_told in [false, true, false] {
        let line = compute(&coverage, 1, &token);
        assert_eq!(line.is_some(), is_told);
    }
    // ggml asked about FFT for the text model, not for the encoder.
    answer(&coverage, "FFT", &product("f", "a", 1), Some("unknown"));
    assert_eq!(compute(&coverage, 2, &token), None);
    let image = [product("i", "a", 9)];
    assert_eq!(compute_in(encoder, &coverage, 3, &image), None);
    assert!(coverage.counts());
    let line = compute(&coverage, 2, &token);
    let want = "HEX0: 1 of 1 nodes of a graph of 9 rows, in 1 split";
    assert_eq!(line.as_deref(), Some(want));
    assert!(!coverage.counts(), "the token was logged");
}

#[test]
fn parts_of_a_graph_without_a_number_are_one_token() {
    let coverage = one();
    let parts = ["q", "k", "out"];
    for rows in [7, 1] {
        for part in parts {
            let nodes = [product(part, "a", rows), write(rows)];
            assert_eq!(compute(&coverage, 0, &nodes), None);
        }
    }
    let line = compute(&coverage, 0, &[product("q", "a", 1)]);
    let want = "HEX0: 6 of 6 nodes of a token, in 3 splits";
    assert_eq!(line.as_deref(), Some(want));
}

/// Asks about nodes that are refused, computes a token in one list, and returns the line.
fn line_of(coverage: &Coverage, refused: &[(&str, Refusal)]) -> String {
    let context = coverage.begin();
    for (name, reason) in refused {
        answer(coverage, "FFT", &product(name, "a", 1), Some(reason));
    }
    let token = [product("k", "a", 1)];
    assert_eq!(compute_in(context, coverage, 1, &token), None);
    coverage.end("HEX0", context).unwrap()
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
