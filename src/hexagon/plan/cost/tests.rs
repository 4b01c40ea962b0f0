use hexagon_ops::layout::MatrixLayout;

use super::*;
use crate::hexagon::caps::FITTED;
use crate::hexagon::layout::Conversion;

/// The figures are those of the table that the emulator writes, to within the 1 % that it may
/// change by.
#[test]
fn packets_are_the_counted_ones() {
    let table = include_str!("../../../../hexagon-ops/tests/packets.txt");
    let counted = |name: &str| -> f64 {
        let line = table
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}"))
            .trim()
            .parse()
            .unwrap()
    };
    let check = |name: String, have: f64, per: f64| {
        let want = counted(&name) / per;
        assert!(
            (have / want - 1.0).abs() < 0.01,
            "{name}: {have}, counted {want}"
        );
    };
    for (kind, arch) in [("v68", 68), ("v73", 73), ("v75", 75), ("v79", 79)] {
        for (name, weight) in [
            ("q4_0", WeightType::Q4_0),
            ("q4_1", WeightType::Q4_1),
            ("q8_0", WeightType::Q8_0),
            ("iq4_nl", WeightType::Iq4Nl),
            ("mxfp4", WeightType::Mxfp4),
            ("q4_k", WeightType::Q4K),
            ("q5_0", WeightType::Q5_0),
            ("q6_k", WeightType::Q6K),
            ("q5_1", WeightType::Q5_1),
            ("q5_k", WeightType::Q5K),
            ("iq4_xs", WeightType::Iq4Xs),
            ("q3_k", WeightType::Q3K),
            ("q2_k", WeightType::Q2K),
        ] {
            let have = packets(arch, weight);
            check(format!("{kind} gemv_2x1_{name}"), have.dots[0], 1.0);
            check(format!("{kind} gemv_1x2_{name}"), have.dots[1], 1.0);
            check(format!("{kind} dequantize_{name}"), have.dequantize, 1.0);
        }
        for (name, weight) in [
            ("q4_tile", WeightType::Q4Tile),
            ("q8_tile", WeightType::Q8Tile),
        ] {
            let have = packets(arch, weight).dequantize;
            check(format!("{kind} dequantize_{name}"), have, 1.0);
        }
        if arch < 73 {
            // Other operations use the figures of V79, which also computes in qfloat.
            continue;
        }
        let of = |name: &str| counted(&format!("{kind} {name}"));
        let tiles = of("whole_mul_mat_q4_0_m4") - of("dequantize_q4_0");
        let beside = tiles - (of("whole_mul_mat_q4_0_m2") - of("gemv_1x2_q4_0"));
        assert!(
            (PACKETS_BESIDE_TILE / beside - 1.0).abs() < 0.02,
            "{kind} {beside}"
        );
        for (name, kernel) in [
            ("rms_norm", wire::KERNEL_RMS_NORM),
            ("swiglu", wire::KERNEL_SWIGLU),
            ("rope", wire::KERNEL_ROPE),
        ] {
            let have = element_packets(arch, kernel).unwrap();
            check(format!("{kind} {name}"), have, 1024.0);
        }
        for (have, dtype, [few, more], rows) in [
            (ON_TILES, "f16", [32, 64], 32.0),
            (BY_DOTS, "f32", [1, 8], 7.0),
        ] {
            let of = |rows: usize| counted(&format!("{kind} attention_{dtype}_r{rows}"));
            let score = (of(more) - of(few)) / rows;
            let [have_position, have_score] = [have.position, have.score].map(|x| of_arch(arch, x));
            assert!((have_score / score - 1.0).abs() < 0.02, "{dtype} {score}");
            let position = of(1) - score;
            assert!(
                (have_position / position - 1.0).abs() < 0.02,
                "{dtype} {position}"
            );
        }
    }
}

#[test]
fn the_kernel_with_fewer_packets_is_picked() {
    let types = [
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Iq4Nl,
        WeightType::Mxfp4,
        WeightType::Q4K,
        WeightType::Q5_0,
        WeightType::Q6K,
        WeightType::Q5_1,
        WeightType::Q5K,
        WeightType::Iq4Xs,
        WeightType::Q3K,
        WeightType::Q2K,
    ];
    for caps in &crate::hexagon::caps::ALL {
        for weight in types {
            let most = dots(caps.arch, &caps.rates, 1, weight, ActivationBits::Eight).rows();
            let packets = packets(caps.arch, weight);
            for (i, dots) in packets.dots.into_iter().enumerate() {
                assert_eq!(
                    i < most,
                    dots < packets.on_tiles(),
                    "{} {weight:?}",
                    caps.name
                );
            }
        }
        for weight in [WeightType::F16, WeightType::Q4Tile, WeightType::Q8Tile] {
            for bits in [
                ActivationBits::Eight,
                ActivationBits::Sixteen,
                ActivationBits::Auto,
            ] {
                assert_eq!(
                    dots(caps.arch, &caps.rates, 1, weight, bits),
                    Dots::None,
                    "no dot product"
                );
            }
        }
    }
    let v75 = crate::hexagon::caps::by_arch(75).unwrap();
    let of = |weight, bits| dots(75, &v75.rates, 4, weight, bits);
    assert_eq!(of(WeightType::Q4_0, ActivationBits::Eight), Dots::TwoRows);
    assert_eq!(
        of(WeightType::Q4_0, ActivationBits::Sixteen),
        Dots::TwoDigits
    );
    // For this type, two rows of dot products take longer than tiles.
    assert_eq!(of(WeightType::Q3K, ActivationBits::Sixteen), Dots::None);
}

#[test]
fn sixteen_bits_are_the_choice_where_they_cost_nothing() {
    let auto = |packets_per_us, threads, weight| {
        let rates = HexRates {
            packets_per_us,
            ..FITTED
        };
        dots(75, &rates, threads, weight, ActivationBits::Auto)
    };
    let usual = FITTED.packets_per_us;
    // For most types four threads wait for memory, and one thread is slower than memory.
    for weight in [
        WeightType::Q4_0,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q6K,
    ] {
        assert_eq!(auto(usual, 4, weight), Dots::TwoDigits, "{weight:?}");
        assert_eq!(auto(usual / 4.0, 4, weight), Dots::TwoRows, "{weight:?}");
    }
    assert_eq!(auto(usual, 1, WeightType::Q4_0), Dots::TwoRows);
    // This type's second pass over 16-bit activations is expensive: only on fast threads does it
    // not delay memory reads.
    assert_eq!(auto(usual, 4, WeightType::Q5K), Dots::TwoRows);
    assert_eq!(auto(2.0 * usual, 4, WeightType::Q5K), Dots::TwoDigits);
    // This type has fewer bits to read, so there is less waiting to hide in; two rows take longer
    // than tiles.
    assert_eq!(auto(usual, 4, WeightType::Q2K), Dots::OneRow);
    for caps in &crate::hexagon::caps::ALL {
        for threads in [1, 2, 4, 8] {
            for weight in WeightType::ALL {
                let us = |bits| {
                    let dots = dots(caps.arch, &FITTED, threads, weight, bits);
                    tile(caps.arch, weight, 1, dots).microseconds(&FITTED, threads)
                };
                let (auto, eight) = (us(ActivationBits::Auto), us(ActivationBits::Eight));
                assert!(auto <= eight, "{} {threads} {weight:?}", caps.name);
            }
        }
    }
}

#[test]
fn an_attention_reads_its_cache_once_and_the_slowest_part_counts() {
    let tensor = |dtype, ne: [u32; 4], nb0| wire::Tensor {
        buffer: 0,
        dtype,
        offset: 0,
        ne,
        nb: [nb0; 4],
    };
    let body = wire::Attention {
        q: tensor(wire::TYPE_F32, [64, 32, 9, 1], 4),
        k: tensor(wire::TYPE_F16, [64, 256, 3, 1], 2),
        v: tensor(wire::TYPE_Q8_0, [64, 256, 3, 1], 34),
        dst: tensor(wire::TYPE_F32, [64, 9, 32, 1], 4),
        ..bytemuck::Zeroable::zeroed()
    };
    let cost = attention(75, &body);
    let packets = |arch, body: &wire::Attention| attention(arch, body).other_packets;
    let near = |have: f64, want: f64| (have / want - 1.0).abs() < 1e-9;
    // Three heads of 256 positions: each position costs 11.78 packets, and its 96 scores 1.2
    // packets each.
    assert!(near(cost.other_packets, 97_520.64), "{cost:?}");
    assert!(near(packets(79, &body), 114_670.08));
    // Two sequences, in which each head has the same number of rows.
    let mut two = body;
    two.q.ne[3] = 2;
    assert!(near(packets(75, &two), 2.0 * 97_520.64));
    // Half as many keys and values again.
    let mut longer = body;
    longer.v.ne[0] = 97;
    assert!(near(packets(75, &longer), 768.0 * (1.5 * 11.78 + 115.2)));
    let halves = 64 * 256 * 3;
    let want = 2 * 4 * 64 * 32 * 9 + 2 * halves + halves / 32 * 34;
    assert_eq!(cost.other_bytes, want);
    // Nine tiles of query rows and eight of positions, with two tiles each of keys and values.
    assert_eq!(cost.tile_products, 9 * 8 * 4);
    let caps = crate::hexagon::caps::by_arch(75).unwrap();
    let memory_bound = cost.microseconds(&caps.rates, 1000);
    assert!((memory_bound - want as f64 / 60e3).abs() < 1e-9);
    let busy = Cost {
        other_packets: 1e6,
        ..cost
    };
    assert!(busy.microseconds(&caps.rates, 1) > memory_bound);
    assert!(cost.other_packets > 0.0);
    // A single query needs as many tiles for each head of keys, but missing rows cost no packets.
    let mut one = body;
    one.q.ne[1] = 1;
    let one = attention(75, &one);
    assert_eq!(one.tile_products, 3 * 8 * 4);
    assert!(one.other_packets < cost.other_packets / 2.0);
    // Values that may overflow FP16 are computed without the matrix unit.
    let mut wide = body;
    wide.k.dtype = wire::TYPE_F32;
    let wide = attention(75, &wide);
    assert_eq!(wide.tile_products, 0);
    // Twelve passes of eight rows.
    assert!(near(wide.other_packets, 2_152_120.32), "{wide:?}");
}

/// Weights of 18 × 48 tiles in Q4_0.
fn weights(slices: [usize; 2]) -> WeightLayout {
    WeightLayout {
        matrix: MatrixLayout::new(WeightType::Q4_0, 1536, 576).unwrap(),
        slices,
        form: Conversion::Lossless,
    }
}

/// Fails if costs differ by more than the last digits.
fn assert_cost(have: Cost, packets: [f64; 2], bytes: [u64; 2], tile_products: u64, what: &str) {
    let near = |have: f64, want: f64| (have - want).abs() < 1e-6 * want.max(1.0);
    assert!(
        near(have.weight_packets, packets[0]) && near(have.other_packets, packets[1]),
        "{what}: {have:?}"
    );
    let counts = (have.weight_bytes, have.other_bytes, have.tile_products);
    assert_eq!(counts, (bytes[0], bytes[1], tile_products), "{what}");
}

#[test]
fn costs_add_up_and_take_the_time_of_the_slowest_unit() {
    let one = Cost {
        weight_packets: 1.0,
        weight_bytes: 20,
        other_packets: 300.0,
        other_bytes: 4000,
        tile_products: 50_000,
    };
    let mut sum = one;
    sum += one;
    assert_cost(sum, [2.0, 600.0], [40, 8000], 100_000, "twice");

    let v75 = crate::hexagon::caps::by_arch(75).unwrap();
    let cost = Cost {
        weight_packets: 3300.0,
        weight_bytes: 30_000,
        other_packets: 1100.0,
        other_bytes: 30_000,
        tile_products: 1000,
    };
    // 60 kB at 60 GB/s; 4400 packets at 1100 for each µs and thread; 2^16 operations for each
    // product of tiles at 12,032.54 GFLOPS.
    let near = |have: f64, want: f64| (have / want - 1.0).abs() < 1e-6;
    for (threads, vector) in [(0, 4.0), (1, 4.0), (2, 2.0), (4, 1.0)] {
        let [memory, of_vector, matrix] = cost.unit_microseconds(&v75.rates, threads);
        assert!(near(memory, 1.0) && near(of_vector, vector) && near(matrix, 5.446_564));
        assert!(near(cost.microseconds(&v75.rates, threads), 5.446_564));
    }
}

#[test]
fn products_cost_their_tiles_bytes_and_rows() {
    let cost = |m, planes, slices, dots: Dots, vtcm_bytes| {
        let body = wire::MatMul {
            m,
            planes,
            dots: dots as u32,
            ..bytemuck::Zeroable::zeroed()
        };
        of(
            75,
            vtcm_bytes,
            &Command::MulMat(Box::new(body), weights(slices)),
        )
    };
    let one = [1, 1];
    let (all, half) = (8 << 20, 512 << 10);
    // 864 tiles of 576 bytes. A tile costs 8.75 packets for one row, 16.75 for two, and 18.47 + 5.2
    // on the matrix unit.
    let bytes = 497_664;
    for (what, have, packets, bytes, tile_products) in [
        (
            "one row",
            cost(1, one, [1, 1], Dots::TwoRows, all),
            7560.0,
            [bytes, 8448],
            0,
        ),
        (
            "16 bits",
            cost(1, one, [1, 1], Dots::TwoDigits, all),
            14_472.0,
            [bytes, 8448],
            0,
        ),
        (
            "two rows",
            cost(2, one, [1, 1], Dots::TwoRows, all),
            14_472.0,
            [bytes, 16_896],
            0,
        ),
        (
            "no dots",
            cost(1, one, [1, 1], Dots::None, all),
            20_450.88,
            [bytes, 8448],
            864,
        ),
        (
            "33 rows",
            cost(33, one, [1, 1], Dots::TwoRows, all),
            20_450.88,
            [bytes, 278_784],
            1728,
        ),
        // 256 rows fit at a time.
        (
            "1024 rows",
            cost(1024, one, [1, 1], Dots::TwoRows, half),
            81_803.52,
            [4 * bytes, 8_650_752],
            27_648,
        ),
        // Planes of one matrix are one product.
        (
            "11 planes",
            cost(3, [11, 1], [1, 1], Dots::TwoRows, all),
            20_450.88,
            [bytes, 278_784],
            1728,
        ),
        // Two rows for each of three matrices.
        (
            "3 matrices",
            cost(1, [3, 2], [3, 1], Dots::TwoRows, all),
            43_416.0,
            [3 * bytes, 50_688],
            0,
        ),
        (
            "3 matrices of tiles",
            cost(3, [3, 2], [3, 1], Dots::TwoRows, all),
            61_352.64,
            [3 * bytes, 152_064],
            2592,
        ),
    ] {
        assert_cost(have, [packets, 0.0], bytes, tile_products, what);
    }
    let of_experts = |slots, tokens| {
        let body = wire::MatMulId {
            slots,
            tokens,
            dots: Dots::TwoRows as u32,
            ..bytemuck::Zeroable::zeroed()
        };
        of(75, all, &Command::MulMatId(Box::new(body), weights([4, 1])))
    };
    // Four experts of two rows each; two of one row.
    assert_cost(
        of_experts(2, 3),
        [57_888.0, 0.0],
        [4 * bytes, 67_584],
        0,
        "more than experts",
    );
    assert_cost(
        of_experts(2, 1),
        [15_120.0, 0.0],
        [2 * bytes, 16_896],
        0,
        "two of four experts",
    );

    let mut body: wire::MatMul = bytemuck::Zeroable::zeroed();
    (body.m, body.weights.n) = (3, 40);
    assert_eq!(passed_on(&body), 960);
}

#[test]
fn operations_cost_the_elements_that_they_touch() {
    use wire::{TYPE_F16, TYPE_F32, TYPE_I32, TYPE_I64, TYPE_NONE, TYPE_Q4_K, TYPE_Q8_0};
    // A row's strides are those of a transposed tensor, because the cost must not depend on
    // strides.
    let tensor = |dtype, ne: [u32; 4]| wire::Tensor {
        buffer: 0,
        dtype,
        offset: 0,
        ne,
        nb: [1024, 4, 4096, 4096],
    };
    let none = tensor(TYPE_NONE, [0; 4]);
    let rows = tensor(TYPE_F32, [64, 3, 1, 1]);
    let five = tensor(TYPE_F32, [64, 5, 1, 1]);
    let ids = |dtype, n| tensor(dtype, [n, 1, 1, 1]);
    for (what, kernel, dst, src, packets, bytes) in [
        (
            "norm",
            wire::KERNEL_RMS_NORM,
            rows,
            [rows, none, none],
            [0.784, 0.816],
            1536,
        ),
        (
            "gate",
            wire::KERNEL_SWIGLU,
            rows,
            [rows, rows, none],
            [1.22, 1.448],
            2304,
        ),
        (
            "turn",
            wire::KERNEL_ROPE,
            rows,
            [rows, ids(TYPE_I32, 3), none],
            [1.241, 1.277],
            1548,
        ),
        (
            "sum",
            wire::KERNEL_ADD,
            rows,
            [rows, rows, none],
            [0.0, 0.0],
            2304,
        ),
        // Five rows out of a table of a thousand rows, and five rows of a cache.
        (
            "rows of a table",
            wire::KERNEL_GET_ROWS,
            five,
            [tensor(TYPE_Q8_0, [64, 1000, 1, 1]), ids(TYPE_I32, 5), none],
            [0.0, 0.0],
            5 * 68 + 20 + 1280,
        ),
        (
            "rows to a cache",
            wire::KERNEL_SET_ROWS,
            tensor(TYPE_F16, [64, 1000, 1, 1]),
            [five, ids(TYPE_I64, 5), none],
            [0.0, 0.0],
            1280 + 40 + 640,
        ),
        (
            "turned rows to a cache",
            wire::KERNEL_ROPE_SET_ROWS,
            tensor(TYPE_F16, [32, 6, 1000, 1]),
            [
                tensor(TYPE_F32, [32, 6, 1, 1]),
                ids(TYPE_I32, 1),
                ids(TYPE_I64, 1),
            ],
            [1.241, 1.277],
            768 + 4 + 8 + 384,
        ),
        (
            "a copy of super-blocks",
            wire::KERNEL_COPY,
            tensor(TYPE_F32, [256, 2, 1, 1]),
            [tensor(TYPE_Q4_K, [256, 2, 1, 1]), none, none],
            [0.0, 0.0],
            288 + 2048,
        ),
    ] {
        let body = wire::TensorOp {
            kernel,
            dst,
            src,
            ..bytemuck::Zeroable::zeroed()
        };
        for (arch, each) in [(75, packets[0]), (79, packets[1])] {
            let have = of(arch, 8 << 20, &Command::Tensor(Box::new(body)));
            assert_cost(have, [0.0, 192.0 * each], [0, bytes], 0, what);
        }
    }
    let mut body: wire::WideOp = bytemuck::Zeroable::zeroed();
    let narrow = wire::NarrowTensor::new(&tensor(TYPE_F32, [16, 4, 1, 1])).unwrap();
    (body.dst, body.src[0], body.src[2]) = (narrow, narrow, narrow);
    let have = of(75, 8 << 20, &Command::Wide(Box::new(body)));
    assert_cost(
        have,
        [0.0, 0.0],
        [0, 768],
        0,
        "an operation of more sources",
    );
}

#[test]
fn weights_cost_the_same_from_three_rows_to_thirty_two() {
    let cost = |m| {
        let body = wire::MatMul {
            m,
            planes: [1, 1],
            dots: Dots::TwoRows as u32,
            ..bytemuck::Zeroable::zeroed()
        };
        of(
            75,
            8 << 20,
            &Command::MulMat(Box::new(body), weights([1, 1])),
        )
    };
    let of_weights = |m| {
        let cost = cost(m);
        (cost.weight_packets, cost.weight_bytes, cost.tile_products)
    };
    assert!((4..=32).all(|m| of_weights(m) == of_weights(3)));
    assert_eq!(cost(8).other_bytes, 2 * cost(4).other_bytes);
    assert!(cost(1).weight_packets < cost(2).weight_packets);
    assert!(cost(2).weight_packets < cost(3).weight_packets);
    assert_eq!(cost(33).tile_products, 2 * cost(32).tile_products);
    assert_eq!(cost(33).weight_packets, cost(32).weight_packets);
    assert_eq!(cost(1).weight_bytes, (576 * 1536 / 32 * 18) as u64);
}
