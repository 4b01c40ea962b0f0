//! Graphs, and how the CPU and the device see each other's results.

use ggml_rust_npu::abi::*;

use super::common::*;

#[test]
fn a_product_is_computed_and_computed_again_where_its_tensors_are() {
    let _turn = turn();
    let product = Product::new();
    assert!(
        // SAFETY: the node and all it points to are alive.
        unsafe { npu_supports_op(HEX, &product.node) }
    );
    let stream = Stream::new(HEX);
    assert_eq!(stream.replay(5), None);
    for round in 0..3 {
        product.spoil();
        let status = match round {
            0 => stream.compute(5, &[product.node]),
            _ => stream.replay(5).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        product.check();
    }
}

/// The CPU computes with results in place, so it sees them only after its caches were maintained.
#[test]
fn results_in_shared_memory_are_there_for_the_cpu() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    for round in 0..3 {
        product.spoil();
        let status = match round {
            0 => stream.compute(6, &[product.node]),
            _ => stream.replay(6).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        product.check_values(&values_at(product.node.dst.data, N * M));
    }
}

/// Weights of a norm are in shared memory, where the loader may write them without a function of
/// ours.
#[test]
fn weights_that_the_cpu_writes_in_place_reach_the_device() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, at| row_of_64(name, role, &memory, at);
    let (x, g) = (
        of(c"x", NPU_ROLE_STATE, 0),
        of(c"g", NPU_ROLE_WEIGHTS, 4096),
    );
    let dst = of(c"dst", NPU_ROLE_RESULT, 8192);
    let ones = [1.0f32; 64];
    assert_eq!(memory.set(&x, bytemuck::cast_slice(&ones)), NPU_STATUS_OK);
    let stream = Stream::new(HEX);
    let sum = node(c"ADD", dst, &[x, g]);
    for round in 0..3 {
        let weights = floats(64, round);
        let to = g.data.cast::<f32>();
        // SAFETY: 64 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(weights.as_ptr(), to, 64) };
        let status = match round {
            0 => stream.compute(8, &[sum]),
            _ => stream.replay(8).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        let want: Vec<f32> = weights.iter().map(|g| 1.0 + g).collect();
        assert_eq!(values_at(dst.data, 64), want, "round {round}");
    }
}

/// ggml's device for `-sm tensor` hands nodes that the NPU does not compute to nobody else, so the
/// CPU computes them within a graph, in caches, too.
#[test]
fn a_cache_that_the_device_and_the_cpu_write_by_turns_is_seen_by_both() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, at| row_of_64(name, role, &memory, at);
    let x = of(c"x", NPU_ROLE_STATE, 0);
    let computed = of(c"x (computed)", NPU_ROLE_RESULT, 0);
    let cache = of(c"cache", NPU_ROLE_STATE, 4096);
    let result = of(c"result", NPU_ROLE_RESULT, 8192);
    let stream = Stream::new(HEX);
    let [to_cache, from_cache] = [
        // This cache has the role of a recurrent state, which the CPU usually does not read.
        node(c"CPY", cache, &[computed, cache]),
        node(c"ADD", result, &[cache, x]),
    ];
    for round in 0..3 {
        let values = floats(64, round);
        assert_eq!(memory.set(&x, bytemuck::cast_slice(&values)), NPU_STATUS_OK);
        // A graph without a number may be one whose nodes the program inspects.
        assert_eq!(
            stream.compute(u64::from(round) + 1, &[to_cache]),
            NPU_STATUS_OK
        );
        assert_ne!(values_at(cache.data, 64), values, "seen unasked");
        // SAFETY: the tensor is in a live buffer.
        unsafe { npu_show_to_cpu(&raw const cache) };
        assert_eq!(values_at(cache.data, 64), values, "round {round}");

        let other = floats(64, round + 100);
        let to = cache.data.cast::<f32>();
        // SAFETY: 64 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(other.as_ptr(), to, 64) };
        // SAFETY: the tensor is in a live buffer.
        unsafe { npu_take_from_cpu(&raw const cache) };
        assert_eq!(stream.compute(0, &[from_cache]), NPU_STATUS_OK);
        let want: Vec<f32> = other.iter().zip(&values).map(|(a, b)| a + b).collect();
        assert_eq!(values_at(result.data, 64), want, "round {round}");
    }
}

/// Two rows of a cache are in one cache line. The CPU's part of the line goes to memory before the
/// device writes the rest, and the device's part is fetched.
#[test]
fn rows_of_a_cache_that_the_cpu_wrote_stay_beside_those_of_the_device() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, rows, at| {
        let ne = [8, rows, 1, 1];
        tensor(name, false, ne, NPU_PLACE_DEVICE, role, &memory, at)
    };
    let x = of(c"x", NPU_ROLE_STATE, 1, 0);
    let cache = of(c"cache", NPU_ROLE_STATE, 4, 4096);
    let row = of(c"cache (view)", NPU_ROLE_STATE, 1, 4096 + 32);
    let result = of(c"result", NPU_ROLE_RESULT, 4, 8192);
    let of_cpu = node(c"FFT", result, &[cache]);
    // SAFETY: the node and all it points to are alive.
    unsafe { npu_mark_cpu_reader(&raw const of_cpu) };
    let stream = Stream::new(HEX);
    let compute = |round, graph, node| {
        let status = match round {
            0 => stream.compute(graph, &[node]),
            _ => stream.replay(graph).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
    };
    for round in 0..3 {
        let (values, mut rows) = (floats(8, round), floats(32, round + 100));
        assert_eq!(memory.set(&x, bytemuck::cast_slice(&values)), NPU_STATUS_OK);
        let to = cache.data.cast::<f32>();
        // SAFETY: 32 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), to, 32) };
        compute(round, 11, node(c"ADD", row, &[x, x]));
        for (to, value) in rows[8..16].iter_mut().zip(&values) {
            *to = 2.0 * value;
        }
        assert_eq!(values_at(cache.data, 32), rows, "round {round}");
        compute(round, 12, node(c"ADD", result, &[cache, cache]));
        rows.iter_mut().for_each(|value| *value *= 2.0);
        assert_eq!(values_at(result.data, 32), rows, "round {round}");
    }
}

/// ggml lets the CPU compute a node in place of the result that it reads. Regression: lines of that
/// node in the CPU's cache were written over the device's next result.
#[test]
fn what_the_cpu_computes_in_place_of_a_result_does_not_spoil_the_next_one() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, at| row_of_64(name, role, &memory, at);
    let x = of(c"x", NPU_ROLE_STATE, 0);
    let result = of(c"result", NPU_ROLE_RESULT, 4096);
    // The input of the device's next split of the graph.
    let input = of(c"input", NPU_ROLE_STATE, 8192);
    let stream = Stream::new(HEX);
    let sum = node(c"ADD", result, &[x, x]);
    for round in 0..3 {
        let values = floats(64, round);
        assert_eq!(memory.set(&x, bytemuck::cast_slice(&values)), NPU_STATUS_OK);
        let status = match round {
            0 => stream.compute(13, &[sum]),
            _ => stream.replay(13).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        let twice: Vec<f32> = values.iter().map(|value| 2.0 * value).collect();
        assert_eq!(values_at(result.data, 64), twice, "round {round}");
        let of_cpu = floats(64, round + 100);
        let to = result.data.cast::<f32>();
        // SAFETY: 64 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(of_cpu.as_ptr(), to, 64) };
        if round < 2 {
            continue;
        }
        // ggml copies the result directly from its memory.
        // SAFETY: floats of a live buffer, which nothing is writing.
        let bytes = unsafe { std::slice::from_raw_parts(result.data.cast::<u8>(), 256) };
        assert_eq!(memory.set(&input, bytes), NPU_STATUS_OK);
        let (status, read) = memory.get(&input, 256, 0);
        assert_eq!(
            (status, &read[..]),
            (NPU_STATUS_OK, bytemuck::cast_slice(&of_cpu))
        );
    }
}

/// Regression: the device had written the cache before, and the CPU read older bytes.
#[test]
fn the_first_node_of_the_cpu_that_reads_a_cache_sees_what_is_in_it() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 2 * 4096, true);
    let of = |name, at| row_of_64(name, NPU_ROLE_STATE, &memory, at);
    let (x, cache) = (of(c"x", 0), of(c"cache", 4096));
    let values = floats(64, 1);
    assert_eq!(memory.set(&x, bytemuck::cast_slice(&values)), NPU_STATUS_OK);
    let stream = Stream::new(HEX);
    assert_eq!(
        stream.compute(0, &[node(c"ADD", cache, &[x, x])]),
        NPU_STATUS_OK
    );
    let of_cpu = node(c"FFT", x, &[cache]);
    // SAFETY: the node and all it points to are alive.
    unsafe { npu_mark_cpu_reader(&raw const of_cpu) };
    let twice: Vec<f32> = values.iter().map(|value| 2.0 * value).collect();
    assert_eq!(values_at(cache.data, 64), twice);
}

/// ggml's scheduler lets the CPU read a cache without a call to the device. This happens if layers
/// share the cache of an earlier one and have their weights on the CPU, as in Gemma 3n and 4.
#[test]
fn rows_that_are_stored_in_a_cache_are_there_for_a_cpu_that_never_asked() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 4 * 4096, true);
    let of = |name, role, ne, at| tensor(name, false, ne, NPU_PLACE_DEVICE, role, &memory, at);
    let rows = of(c"rows", NPU_ROLE_STATE, [64, 2, 1, 1], 0);
    // A later node's result replaces the numbers, because ggml reuses memory in a graph.
    let mut numbers = of(c"numbers", NPU_ROLE_STATE, [2, 1, 1, 1], 4096);
    (numbers.dtype, numbers.block_bytes) = (NPU_DTYPE_I64, 8);
    numbers.nb = [8, 16, 16, 16];
    let over = of(c"over", NPU_ROLE_RESULT, [64, 1, 1, 1], 4096);
    let cache = of(c"cache (view)", NPU_ROLE_STATE, [64, 16, 1, 1], 8192);
    let row = of(c"row", NPU_ROLE_STATE, [64, 1, 1, 1], 0);
    let nodes = [
        node(c"SET_ROWS", cache, &[rows, numbers]),
        node(c"ADD", over, &[row, row]),
    ];
    let mut want = vec![0.0; 64 * 16];
    let zeros = vec![0; 4 * want.len()];
    assert_eq!(memory.set(&cache, &zeros), NPU_STATUS_OK);
    let stream = Stream::new(HEX);
    for round in 0..3_u8 {
        let values = floats(128, round.into());
        assert_eq!(
            memory.set(&rows, bytemuck::cast_slice(&values)),
            NPU_STATUS_OK
        );
        let at = [3 + i64::from(round), 15 - 4 * i64::from(round)];
        assert_eq!(
            memory.set(&numbers, bytemuck::cast_slice(&at)),
            NPU_STATUS_OK
        );
        for (at, values) in at.into_iter().zip(values.chunks(64)) {
            let start = usize::try_from(at).unwrap() * 64;
            want[start..start + 64].copy_from_slice(values);
        }
        let status = match round {
            0 => stream.compute(21, &nodes),
            _ => stream.replay(21).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        assert_eq!(values_at(cache.data, 64 * 16), want, "round {round}");
    }
}

/// Weights that the CPU has just written are not fetched from the device, which never writes them.
#[test]
fn weights_that_are_shown_to_the_cpu_stay_as_it_wrote_them() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 4096, true);
    let ne = [64, 1, 1, 1];
    let w = tensor(
        c"w",
        false,
        ne,
        NPU_PLACE_DEVICE,
        NPU_ROLE_WEIGHTS,
        &memory,
        0,
    );
    let weights = floats(64, 1);
    let to = w.data.cast::<f32>();
    // SAFETY: 64 floats of a live buffer, which nothing else uses now.
    unsafe { std::ptr::copy_nonoverlapping(weights.as_ptr(), to, 64) };
    // SAFETY: the tensor is in a live buffer.
    unsafe { npu_show_to_cpu(&raw const w) };
    assert_eq!(values_at(w.data, 64), weights);
}

#[test]
fn nodes_that_no_npu_computes_are_for_the_cpu_if_it_can_read_them() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let at = |place| {
        tensor(
            c"t",
            false,
            [64, 1, 1, 1],
            place,
            NPU_ROLE_STATE,
            &memory,
            0,
        )
    };
    let prefers = |device, op, place| {
        let node = node(op, at(place), &[at(place), at(place)]);
        // SAFETY: the node and all it points to are alive.
        unsafe { npu_prefers_cpu(device, &raw const node) }
    };
    for (op, hex, rk) in [
        (c"ADD", false, true),
        (c"MUL_MAT", true, true),
        (c"FFT", true, true),
    ] {
        assert_eq!(prefers(HEX, op, NPU_PLACE_DEVICE), hex, "{op:?}");
        assert_eq!(prefers(RK, op, NPU_PLACE_HOST), rk, "{op:?}");
    }
    // Packed bytes are put back into ggml's layout for the CPU.
    assert!(prefers(HEX, c"MUL_MAT", NPU_PLACE_PACKED));
}

#[test]
fn a_graph_without_a_number_is_never_computed_again_without_its_nodes() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    assert_eq!(stream.replay(0), None);
}

/// The line about a model is logged when the first token's graph comes again, or its stream ends.
#[test]
fn a_token_is_counted_and_told_once() {
    let _turn = turn();
    let product = Product::new();
    let mut node = product.node;
    (node.dst.ne[1], node.src[1].ne[1]) = (1, 1);
    for ends_after in [1, 3] {
        let stream = Stream::new(HEX);
        lines_with("");
        for graph in 0..ends_after {
            // The glue begins each graph with this call.
            assert_eq!(stream.replay(0), None);
            assert_eq!(stream.compute(5, &[node]), NPU_STATUS_OK);
            let logged = lines_with("nodes of a token, in 1 split");
            assert_eq!(logged, usize::from(graph == 1), "{graph}");
        }
        drop(stream);
        let logged = lines_with("nodes of a token, in 1 split");
        assert_eq!(logged, usize::from(ends_after == 1));
    }
}

/// Memory of both stand-ins has a file descriptor each.
#[test]
fn a_freed_buffer_gives_its_memory_back() {
    let _turn = turn();
    start();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    for device in [HEX, RK] {
        let before = descriptors();
        let buffer = Buffer::new(device, 4096, false);
        assert!(descriptors() > before, "device {device}");
        drop(buffer);
        assert_eq!(descriptors(), before, "device {device}");
    }
}
