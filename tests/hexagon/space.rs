//! The DSP's address space: buffers share it in turn, and results stay right.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ggml_rust_npu::backend::{Buffer, Content, Device, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::error::Error;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::device::Serving;
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::{DType, Format};
use hexagon_ops::sim::parse_faults;

use super::common::*;

const KIB: u64 = 1024;

/// A device with so few addresses that not even its test at the start would fit.
fn small_device(sim: hexagon_ops::sim::Options, options: Options<'_>) -> Arc<HexDevice> {
    let caps = ggml_rust_npu::hexagon::caps::by_arch(sim.arch).unwrap();
    let rpc = ggml_rust_npu::hexagon::driver::FastRpc::simulate(sim).unwrap();
    Arc::new(HexDevice::untested("HEX0", &rpc, caps, options).unwrap())
}

/// Weights of 72 KiB each, with the padding of pages and a guard page, in separate buffers.
fn layers(
    device: &Arc<HexDevice>,
    numbers: &mut Numbers,
    count: usize,
) -> Vec<(Weight, HexBuffer)> {
    let layer = |_| {
        let w = Weight::random(numbers, KINDS[3], [256, 240, 1, 1]);
        let buffer = buffer_with(device, &w, Place::Packed);
        (w, buffer)
    };
    (0..count).map(layer).collect()
}

/// Compares a product of one row with the reference.
fn assert_right(have: &[f32], w: &Weight, act: &[f32]) {
    let error = reference::nmse(have, &reference::mul_mat(act, &w.values, 256));
    assert!(error <= 1e-4, "{error:.2e}");
}

/// Multiplies with each weight, twice.
fn take_turns(device: &Arc<HexDevice>, layers: &[(Weight, HexBuffer)], act: &[f32]) {
    for (w, buffer) in layers.iter().chain(layers) {
        let have = mul_mat(device, w, buffer, act, [256, 1, 1, 1]).unwrap();
        assert_right(&have, w, act);
    }
}

/// Returns the products of all weights as nodes of a graph.
fn products<'a>(layers: &'a [(Weight, HexBuffer)], work: &'a [Work]) -> Vec<Node<'a>> {
    let nodes = (layers.iter().zip(work))
        .map(|((w, buffer), work)| work.node(Op::MulMat, w.tensor(0, Place::Packed), buffer));
    nodes.collect()
}

/// Multiplies with all weights in one graph, which does not fit at once.
fn multiply_all(
    device: &Arc<HexDevice>,
    layers: &[(Weight, HexBuffer)],
    act: &[f32],
) -> (HexStream, Vec<Work>) {
    let of_layer = |(w, _): &(Weight, HexBuffer)| {
        Work::new(device, act, [256, 1, 1, 1], [w.ne[1], 1, 1, 1], &[7]).unwrap()
    };
    let work: Vec<_> = layers.iter().map(of_layer).collect();
    let stream = HexStream::new(Arc::clone(device));
    stream.submit(0, &mut products(layers, &work)).unwrap();
    for ((w, _), work) in layers.iter().zip(&work) {
        assert_right(&work.result(), w, act);
    }
    (stream, work)
}

#[test]
fn weights_beyond_the_address_space_take_turns() {
    let options = Options {
        address_bytes: Some(200 * KIB),
        ..OPTIONS
    };
    // The stand-in also refuses to map more than that.
    let mut sim = strict(73);
    sim.address_bytes = 200 * KIB;
    let device = small_device(sim, options);
    let mut numbers = Numbers::new(20);
    let layers = layers(&device, &mut numbers, 6);
    let act = numbers.floats(256);
    for _ in 0..2 {
        multiply_all(&device, &layers, &act);
    }
}

/// The host splits a submission that is too large by its own account, and halves one that the DSP
/// refuses in addition. If a node of a later part fails, the error names it.
#[test]
fn parts_of_a_graph_that_the_dsp_refuses_are_halved() {
    let options = Options {
        address_bytes: Some(400 * KIB),
        ..OPTIONS
    };
    let mut sim = strict(73);
    sim.address_bytes = 260 * KIB;
    let device = small_device(sim, options);
    let mut numbers = Numbers::new(26);
    let layers = layers(&device, &mut numbers, 6);
    let act = numbers.floats(256);
    let (stream, work) = multiply_all(&device, &layers, &act);
    // An index outside the last layer's activations.
    let last = &work[5];
    let operation = Operation {
        op: Op::GetRows,
        params: [0; PARAMS],
        dst: Tensor {
            place: Place::Device,
            ..tensor("row", DType::F32, [240, 1, 1, 1], last.dst.packed_offset)
        },
        src: sources(&[
            Tensor {
                place: Place::Device,
                ..tensor("rows", DType::F32, [240, 1, 1, 1], last.act.packed_offset)
            },
            Tensor {
                place: Place::Device,
                ..last.ids
            },
        ]),
    };
    let mut sources = [None; MAX_SOURCES];
    sources[..2].fill(Some(&last.buffer));
    // Each part has two commands, and this is the second one of a part.
    let mut nodes = products(&layers[1..], &work[1..]);
    nodes.push(node(operation, Some(&last.buffer), sources));
    let failed = stream.submit(0, &mut nodes).unwrap_err();
    assert_eq!(failed.node, Some(5), "{failed:?}");
    assert!(!device.npu().is_lost());
}

/// Regression: the DSP refused such a mapping each time, and nothing was unmapped.
#[test]
fn an_address_space_that_is_fuller_than_thought_is_made_room_in() {
    let mut sim = strict(73);
    sim.address_bytes = 200 * KIB;
    let device = small_device(sim, OPTIONS);
    let mut numbers = Numbers::new(22);
    let layers = layers(&device, &mut numbers, 4);
    take_turns(&device, &layers, &numbers.floats(256));
}

/// Regression: `fastrpc_mmap` failed when the kernel's window was full of buffers that nothing was
/// using, and the model did not load.
#[test]
fn a_full_window_of_the_system_is_made_room_in() {
    let mut sim = strict(75);
    // Room for the ring, and for three of the weights with the operands of a product.
    sim.window_bytes = 664 * KIB + 260 * KIB;
    let device = small_device(sim, OPTIONS);
    let machine = device.npu().rpc().stand_in().unwrap();
    let mut numbers = Numbers::new(23);
    let layers = layers(&device, &mut numbers, 6);
    assert!(machine.refusals("fastrpc_mmap") > 0);
    let act = numbers.floats(256);
    take_turns(&device, &layers, &act);
    // One graph uses all of them, and they do not fit at the same time.
    let work = Work::new(&device, &act, [256, 1, 1, 1], [240, 1, 1, 1], &[]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let nodes = (layers.iter())
        .map(|(w, buffer)| work.node(Op::MulMat, w.tensor(0, Place::Packed), buffer));
    stream.submit(3, &mut nodes.collect::<Vec<_>>()).unwrap();
    assert_right(&work.result(), &layers[5].0, &act);
    stream.replay(3).unwrap().unwrap();
    // Nothing is unmapped that the DSP still uses, and nothing stays mapped.
    assert_eq!(machine.refusals("fastrpc_munmap"), 0);
    drop((stream, work, layers));
    assert_eq!(machine.live().mappings, 1);
}

/// Regression: the system dropped a mapping with the call in which the DSP had unmapped it, and the
/// next mapping was refused.
///
/// - `turns`: products with each of the weights
fn take_turns_where_mappings_vanish(serving: Serving, weights: usize, turns: usize) {
    let mut sim = strict(73);
    sim.address_bytes = 200 * KIB;
    sim.vanishing_maps = true;
    let options = Options {
        address_bytes: Some(200 * KIB),
        serving,
        ..OPTIONS
    };
    let device = small_device(sim, options);
    let machine = device.npu().rpc().stand_in().unwrap();
    let mut numbers = Numbers::new(27);
    let layers = layers(&device, &mut numbers, weights);
    let act = numbers.floats(256);
    for _ in 0..turns {
        for (w, buffer) in &layers {
            let have = mul_mat(&device, w, buffer, &act, [256, 1, 1, 1]).unwrap();
            assert_right(&have, w, &act);
        }
        // The call ends, and with it the mappings end.
        std::thread::sleep(Duration::from_millis(40));
    }
    drop(layers);
    let live = machine.live();
    assert_eq!((live.mappings, live.allocations), (1, 1));
}

#[test]
fn what_went_with_a_call_is_announced_again() {
    take_turns_where_mappings_vanish(Serving::Thread, 6, 5);
}

/// Here each call ends before the host takes any buffer back: the library then keeps the numbers in
/// its list, and other numbers replace them.
#[test]
fn what_the_library_lists_for_good_is_announced_by_another_number() {
    take_turns_where_mappings_vanish(Serving::Caller, 3, 4);
}

/// As reported in qualcomm/fastrpc issue 137.
#[test]
fn room_that_comes_late_is_waited_for() {
    for serving in [Serving::Thread, Serving::Caller] {
        let mut sim = strict(75);
        sim.window_bytes = 664 * KIB + 260 * KIB;
        sim.late_unmaps = true;
        let options = Options { serving, ..OPTIONS };
        let device = small_device(sim, options);
        let mut numbers = Numbers::new(28);
        let layers = layers(&device, &mut numbers, 6);
        take_turns(&device, &layers, &numbers.floats(256));
        drop(layers);
        // As much as the window holds, in one buffer.
        HexBuffer::new(&device, 240 * 1024, false).unwrap();
    }
}

/// Regression: the next buffer had the same number of a descriptor. The system finds mappings by
/// this number, so the DSP had the old bytes for it.
#[test]
fn memory_whose_mapping_stays_is_not_replaced() {
    let mut sim = strict(75);
    sim.faults = parse_faults("fastrpc_munmap:1+=1").unwrap();
    let device = small_device(sim, OPTIONS);
    let machine = device.npu().rpc().stand_in().unwrap();
    let before = machine.live();
    let mut numbers = Numbers::new(29);
    for kept in 1..4 {
        let w = Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        let act = numbers.floats(256);
        let have = mul_mat(&device, &w, &buffer, &act, [256, 1, 1, 1]).unwrap();
        assert_right(&have, &w, &act);
        drop(buffer);
        let live = machine.live();
        assert!(live.allocations >= before.allocations + kept, "{live:?}");
        assert_eq!(live.allocations, live.mappings, "{live:?}");
    }
}

#[test]
fn memory_that_no_room_can_be_made_for_is_refused_and_the_next_works() {
    let mut sim = strict(75);
    sim.window_bytes = 664 * KIB + 100 * KIB;
    let device = small_device(sim, OPTIONS);
    let mut numbers = Numbers::new(24);
    let w = Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let error = HexBuffer::new(&device, 200 * 1024, false).err().unwrap();
    assert!(matches!(error, Error::NotMapped { .. }), "{error}");
    assert!(error.to_string().contains("fastrpc_mmap"), "{error}");
    let act = numbers.floats(256 * 40);
    let have = mul_mat(&device, &w, &buffer, &act[..256], [256, 1, 1, 1]).unwrap();
    assert_right(&have, &w, &act[..256]);
    // The operands do not fit next to it.
    let failed = mul_mat(&device, &w, &buffer, &act, [256, 40, 1, 1]).unwrap_err();
    assert!(
        matches!(failed.error, Error::NotMapped { .. }),
        "{failed:?}"
    );
    assert_eq!(failed.node, Some(0));
    assert!(!device.npu().is_lost());
}

#[test]
fn a_buffer_larger_than_the_address_space_is_refused() {
    let options = Options {
        address_bytes: Some(64 * KIB),
        ..OPTIONS
    };
    let device = small_device(strict(75), options);
    // With its guard page the buffer is too large.
    let error = HexBuffer::new(&device, 60 * 1024 + 1, false).unwrap_err();
    assert!(matches!(error, Error::AddressSpace { .. }), "{error}");
    HexBuffer::new(&device, 60 * 1024, false).unwrap();
}

#[test]
fn a_node_whose_operands_do_not_fit_together_fails_and_the_next_one_works() {
    let options = Options {
        address_bytes: Some(100 * KIB),
        ..OPTIONS
    };
    let device = small_device(strict(75), options);
    let mut numbers = Numbers::new(21);
    let w = Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(256 * 20);
    let failed = mul_mat(&device, &w, &buffer, &act, [256, 20, 1, 1]).unwrap_err();
    assert!(
        matches!(failed.error, Error::AddressSpace { .. }),
        "{failed:?}"
    );
    assert_eq!(failed.node, Some(0));
    let have = mul_mat(&device, &w, &buffer, &act[..256], [256, 1, 1, 1]).unwrap();
    assert_right(&have, &w, &act[..256]);
}

#[test]
fn operands_that_are_not_there_take_no_room() {
    let options = Options {
        address_bytes: Some(100 * KIB),
        ..OPTIONS
    };
    let device = small_device(strict(75), options);
    // The first buffer, which nothing uses, and one with the operands do not fit at the same time.
    let _first = HexBuffer::new(&device, 60 * 1024, true).unwrap();
    let memory = HexBuffer::new(&device, 60 * 1024, true).unwrap();
    let x = Numbers::new(24).floats(32);
    let on_device = |at| Tensor {
        place: Place::Device,
        ..tensor("x", DType::F32, [32, 1, 1, 1], at)
    };
    let (src, dst) = (on_device(0), on_device(128));
    memory
        .write(&src, 0, 128, Content::Bytes(bytemuck::cast_slice(&x)))
        .unwrap();
    let operation = Operation {
        op: Op::Neg,
        params: [0; PARAMS],
        dst,
        src: sources(&[src]),
    };
    let mut sources = [None; MAX_SOURCES];
    sources[0] = Some(&memory);
    let stream = HexStream::new(Arc::clone(&device));
    stream
        .submit(0, &mut [node(operation, Some(&memory), sources)])
        .unwrap();
    let mut have = vec![0.0f32; 32];
    memory
        .read(&dst, 0, bytemuck::cast_slice_mut(&mut have))
        .unwrap();
    assert_eq!(have, x.iter().map(|x| -x).collect::<Vec<_>>());
}

/// The first node becomes no command, so that a command's number is not its node's.
#[test]
fn a_failure_has_the_number_of_its_node_in_the_graph() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("failing.csv");
    for trace in [None, Some(&*path)] {
        let options = Options {
            address_bytes: Some(100 * KIB),
            trace,
            ..OPTIONS
        };
        let device = small_device(strict(75), options);
        let mut numbers = Numbers::new(25);
        let w = Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        let act = numbers.floats(256 * 20);
        let [fits, does_not] = [1, 20].map(|m| {
            let act = &act[..256 * m];
            Work::new(&device, act, [256, m, 1, 1], [240, m, 1, 1], &[]).unwrap()
        });
        let mut nodes = [&fits, &fits, &does_not]
            .map(|work| work.node(Op::MulMat, w.tensor(0, Place::Packed), &buffer));
        nodes[0].operation.dst.shape.ne[1] = 0;
        let stream = HexStream::new(Arc::clone(&device));
        let failed = stream.submit(0, &mut nodes).unwrap_err();
        assert!(
            matches!(failed.error, Error::AddressSpace { .. }),
            "{failed:?}"
        );
        assert_eq!(failed.node, Some(2), "traced: {}", trace.is_some());
    }
}

/// Regression: a weight larger than any buffer failed the load of the model, although the CPU could
/// have computed with it.
#[test]
fn heads_that_no_buffer_takes_are_left_to_the_cpu() {
    let gib = 1u64 << 30;
    let mut answers = Vec::new();
    for arch in [73, 81] {
        let device = device_with(strict(arch), OPTIONS).unwrap();
        // Llama 8B and 70B, Gemma 12B, Command R+ 104B.
        for [k, n] in [
            [4096, 128_256],
            [8192, 128_256],
            [3840, 262_144],
            [12288, 256_000],
        ] {
            for dtype in [DType::F16, DType::F32, KINDS[3].dtype(), KINDS[1].dtype()] {
                let w = Tensor {
                    place: Place::Packed,
                    role: Role::Weights,
                    format: match dtype {
                        dtype if dtype == KINDS[3].dtype() => Some(Format::Q8_0),
                        dtype if dtype == KINDS[1].dtype() => Some(Format::Q4_0),
                        _ => None,
                    },
                    ..tensor("output.weight", dtype, [k, n, 1, 1], 0)
                };
                let operation = Operation {
                    op: Op::MulMat,
                    params: [0; PARAMS],
                    dst: tensor("logits", DType::F32, [n, 512, 1, 1], 0),
                    src: sources(&[w, tensor("x", DType::F32, [k, 512, 1, 1], 0)]),
                };
                let bytes = device.packed_bytes(&w) as u64;
                let supported = device.supports(&operation);
                // The address space is large enough for the weight and 1000 MiB more, and all
                // lengths fit into 32 bits.
                let fits =
                    bytes < 2 * gib && bytes + (1000 << 20) < device.npu().caps().address_bytes;
                assert_eq!(supported, fits, "V{arch} {k} x {n} {dtype:?}: {bytes}");
                answers.push(supported);
            }
        }
    }
    assert!(answers.contains(&true) && answers.contains(&false));
}

/// Regression: `GGML_RUST_NPU_REPACK=always` ended llama-completion. Its cache is in a buffer that
/// packs, which refused SET_ROWS.
#[test]
fn a_cache_in_a_buffer_that_packs_is_written_and_read_by_operations() {
    let options = Options {
        repack: Repack::Always,
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let packed = |name, dtype, ne, offset| Tensor {
        place: Place::Packed,
        ..tensor(name, dtype, ne, offset)
    };
    let cache = packed("cache_k", DType::F16, [64, 32, 1, 1], 0);
    let rows = packed("k", DType::F32, [64, 3, 1, 1], 4096);
    let indices = packed("indices", DType::I64, [3, 1, 1, 1], 4864);
    let operation = |op, dst, src: &[Tensor<'static>]| Operation {
        op,
        params: [0; PARAMS],
        dst,
        src: sources(src),
    };
    let write = operation(Op::SetRows, cache, &[rows, indices, cache]);
    let copy = packed("copy", DType::F32, [64, 32, 1, 1], 4992);
    let read = operation(Op::Cpy, copy, &[cache, copy]);
    assert!(device.supports(&write) && device.supports(&read));
    let buffer = HexBuffer::new(&device, 4992 + 64 * 32 * 4, false).unwrap();
    buffer.clear(0);
    // The program restores the state by writing it, and that packs it.
    let halves: Vec<u8> = [half::f16::ONE.to_le_bytes(); 64 * 32].concat();
    buffer
        .write(&cache, 0, halves.len(), Content::Bytes(&halves))
        .unwrap();
    let values = Numbers::new(70).floats(64 * 3);
    buffer
        .write(&rows, 0, 768, Content::Bytes(bytemuck::cast_slice(&values)))
        .unwrap();
    buffer
        .write(
            &indices,
            0,
            24,
            Content::Bytes(bytemuck::cast_slice(&[30i64, 0, 7])),
        )
        .unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let mut nodes =
        [write, read].map(|operation| node(operation, Some(&buffer), [Some(&buffer); MAX_SOURCES]));
    stream.submit(0, &mut nodes).unwrap();
    let mut have = vec![0.0f32; 64 * 32];
    buffer
        .read(&copy, 0, bytemuck::cast_slice_mut(&mut have))
        .unwrap();
    for (row, have) in have.chunks_exact(64).enumerate() {
        let written = [30, 0, 7].iter().position(|index| *index == row);
        let want = (0..64).map(|i| match written {
            Some(from) => half::f16::from_f32(values[from * 64 + i]).to_f32(),
            None => 1.0,
        });
        assert!(want.eq(have.iter().copied()), "row {row}");
    }
}

/// With an error of one, the host would regard a refused mapping as executed, or the reverse.
#[test]
fn after_a_mapping_that_the_dsp_refuses_the_host_knows_what_is_mapped() {
    let mut sim = strict(75);
    // Fewer bytes than the host assumes.
    sim.address_bytes = 160 * KIB;
    let device = small_device(sim, OPTIONS);
    let mut numbers = Numbers::new(22);
    // The first weight has 68 KiB. Neither of the two others fits together with it.
    let kinds = [[256, 240, 1, 1], [256, 400, 1, 1], [256, 400, 1, 1]];
    let weights = kinds.map(|ne| Weight::random(&mut numbers, KINDS[3], ne));
    let buffers: Vec<_> = (weights.iter())
        .map(|w| buffer_with(&device, w, Place::Packed))
        .collect();
    let act = numbers.floats(256);
    let check = |which: usize| {
        let w = &weights[which];
        let have = mul_mat(&device, w, &buffers[which], &act, [256, 1, 1, 1]);
        let want = reference::mul_mat(&act, &w.values, 256);
        have.map(|have| assert!(reference::nmse(&have, &want) <= 1e-4))
    };
    check(0).unwrap();
    // A single graph: its first weight is mapped, and the second is not, or not at the same time.
    let work: Vec<_> = (weights.iter())
        .map(|w| Work::new(&device, &act, [256, 1, 1, 1], [w.ne[1], 1, 1, 1], &[]).unwrap())
        .collect();
    let stream = HexStream::new(Arc::clone(&device));
    let nodes = (weights.iter().zip(&buffers).zip(&work))
        .map(|((w, buffer), work)| work.node(Op::MulMat, w.tensor(0, Place::Packed), buffer));
    stream.submit(0, &mut nodes.collect::<Vec<_>>()).unwrap();
    drop((stream, work));
    check(0).unwrap();
    let [first, second, third]: [HexBuffer; 3] = buffers.try_into().unwrap();
    drop(first);
    for (w, buffer) in weights[1..].iter().zip([second, third]) {
        let have = mul_mat(&device, w, &buffer, &act, [256, 1, 1, 1]).unwrap();
        let want = reference::mul_mat(&act, &w.values, 256);
        assert!(reference::nmse(&have, &want) <= 1e-4);
    }
}

#[test]
fn two_sessions_work_side_by_side() {
    let rpc = ggml_rust_npu::hexagon::driver::FastRpc::simulate(strict(75)).unwrap();
    let caps = ggml_rust_npu::hexagon::caps::by_arch(75).unwrap();
    let start = |session| {
        let name = format!("HEX{session}");
        let options = Options { session, ..OPTIONS };
        ggml_rust_npu::hexagon::HexDevice::start(&name, &rpc, caps, options).unwrap()
    };
    let devices = [start(0), start(1), start(2)];
    std::thread::scope(|scope| {
        for (seed, device) in (30..).zip(&devices) {
            scope.spawn(move || {
                let mut numbers = Numbers::new(seed);
                let w = Weight::random(&mut numbers, KINDS[1], [128, 64, 1, 1]);
                let buffer = buffer_with(device, &w, Place::Packed);
                for m in [1, 3, 9] {
                    let act = numbers.floats(128 * m);
                    let have = mul_mat(device, &w, &buffer, &act, [128, m, 1, 1]).unwrap();
                    let want = reference::mul_mat(&act, &w.values, 128);
                    assert!(reference::nmse(&have, &want) <= 1e-4);
                }
            });
        }
    });
}

/// Regression: the second compute DSP of a QCS9075 was not used.
#[test]
fn all_dsps_of_a_chip_are_found_and_compute() {
    use ggml_rust_npu::config::Config;
    use ggml_rust_npu::hexagon::discovery::sessions_behind;
    use ggml_rust_npu::hexagon::driver::{Domain, FastRpc};
    for (dsps, per_dsp, want) in [
        (1, "1", vec![Domain::Cdsp]),
        (2, "1", vec![Domain::Cdsp, Domain::Cdsp1]),
        (
            2,
            "2",
            vec![Domain::Cdsp, Domain::Cdsp, Domain::Cdsp1, Domain::Cdsp1],
        ),
        (4, "1", Domain::ALL.to_vec()),
    ] {
        let sim = hexagon_ops::sim::Options { dsps, ..strict(73) };
        let rpc = FastRpc::simulate(sim).unwrap();
        let variable = |name| (name == "GGML_RUST_NPU_HEX_SESSIONS").then(|| per_dsp.to_owned());
        let config = Config::from_lookup(variable).unwrap();
        let sessions = sessions_behind(&rpc, &config);
        let sessions = sessions.into_iter().map(|session| session.unwrap());
        let devices: Vec<_> = (sessions.enumerate())
            .map(|(index, session)| {
                let dsp = session.dsp();
                (dsp, session.start(&format!("HEX{index}"), &config).unwrap())
            })
            .collect();
        let dsps: Vec<_> = devices.iter().map(|(dsp, _)| *dsp).collect();
        assert_eq!(dsps, want);
        std::thread::scope(|scope| {
            for (seed, (dsp, device)) in (50..).zip(&devices) {
                let is_second = device.description().contains("NPU cdsp1, ");
                assert_eq!(is_second, *dsp == Domain::Cdsp1, "{}", device.description());
                scope.spawn(move || {
                    let mut numbers = Numbers::new(seed);
                    let w = Weight::random(&mut numbers, KINDS[1], [128, 64, 1, 1]);
                    let buffer = buffer_with(device, &w, Place::Packed);
                    let act = numbers.floats(128 * 3);
                    let have = mul_mat(device, &w, &buffer, &act, [128, 3, 1, 1]).unwrap();
                    let want = reference::mul_mat(&act, &w.values, 128);
                    assert!(reference::nmse(&have, &want) <= 1e-4);
                });
            }
        });
        let names: Vec<_> = devices
            .iter()
            .map(|(_, device)| device.name().to_owned())
            .collect();
        assert_eq!(names, ["HEX0", "HEX1", "HEX2", "HEX3"][..names.len()]);
    }
}
