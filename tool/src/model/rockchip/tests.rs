use ggml_rust_npu::gguf::{GgmlType, TensorInfo};
use ggml_rust_npu::rockchip::caps;

use super::super::published::speeds;
use super::super::shape::Layer;
use super::*;

/// Sizes of a model, by which its tensors are made.
struct Sizes {
    arch: &'static str,
    layers: usize,
    embed: usize,
    inner: usize,
    heads: [usize; 2],
    head: usize,
    words: usize,
}

// SOURCE: Qwen2.5-1.5B and Gemma 3 1B: scripts/shapes.py. Ministral 3 3B: Megatron-Bridge's page of
// the model has 26 layers, 3,072 elements, 32 and 8 heads; the inner size follows from its 3.4
// billion parameters.
const QWEN2: Sizes = Sizes {
    arch: "qwen2",
    layers: 28,
    embed: 1536,
    inner: 8960,
    heads: [12, 2],
    head: 128,
    words: 151_936,
};
const GEMMA3: Sizes = Sizes {
    arch: "gemma3",
    layers: 26,
    embed: 1152,
    inner: 6912,
    heads: [4, 1],
    head: 256,
    words: 262_144,
};
const MINISTRAL3: Sizes = Sizes {
    arch: "mistral3",
    layers: 26,
    embed: 3072,
    inner: 9216,
    heads: [32, 8],
    head: 128,
    words: 131_072,
};

fn product(name: &str, dtype: GgmlType, [k, n]: [usize; 2]) -> WeightProduct {
    let tensor = TensorInfo {
        name: name.into(),
        dtype,
        ne: [k, n, 1, 1],
        dims: 2,
        range: 0..dtype.row_bytes(k).unwrap() * n,
    };
    WeightProduct::of(&tensor, 1)
}

fn shape(sizes: &Sizes, dtype: GgmlType) -> ModelShape {
    let Sizes { embed, inner, .. } = *sizes;
    let [q, kv] = sizes.heads.map(|heads| heads * sizes.head);
    let products = [
        ("attn_q", [embed, q]),
        ("attn_k", [embed, kv]),
        ("attn_v", [embed, kv]),
        ("attn_output", [q, embed]),
        ("ffn_gate", [embed, inner]),
        ("ffn_up", [embed, inner]),
        ("ffn_down", [inner, embed]),
    ];
    let layer = |index| Layer {
        kv_heads: sizes.heads[1],
        products: products
            .iter()
            .map(|(name, ne)| product(&format!("blk.{index}.{name}.weight"), dtype, *ne))
            .collect(),
        ..Layer::default()
    };
    ModelShape {
        arch: sizes.arch.into(),
        layers: (0..sizes.layers).map(layer).collect(),
        embed,
        heads: sizes.heads[0],
        head: sizes.head,
        output: product("output.weight", dtype, [embed, sizes.words]),
        bytes: 0,
    }
}

fn target(caps: &'static RkCaps) -> Target {
    let config = Config::from_lookup(|_| None).unwrap();
    discovery::target(caps, &config).unwrap()
}

fn token(target: &Target, shape: &ModelShape, cells: usize) -> StepNs {
    let step = Step {
        queries: 1,
        sequences: 1,
        cells,
        logits: 1,
    };
    StepNs::of(target, shape, step)
}

/// The errors that docs/guide/rockchip.md states are within 20 %.
#[test]
fn published_speeds_are_met_within_the_stated_error() {
    let q8_0 = GgmlType::from_number(8).unwrap();
    let target = target(&caps::RK3588);
    // Whether the published prompt computed attention on the CPU.
    let models = [(QWEN2, false), (GEMMA3, true), (MINISTRAL3, true)];
    let mut wrong = Vec::new();
    for (sizes, on_cpu) in models {
        let shape = shape(&sizes, q8_0);
        let known = (sizes.arch, sizes.layers, sizes.embed);
        let speed = speeds(known, "rk3588").find(|speed| speed.weight == "Q8_0");
        let speed = speed.unwrap();
        let prompt = StepNs::of_prompt(&target, &shape, 512, 512);
        let prompt = if on_cpu {
            prompt.cpu_attention_tokens_per_s(512)[1]
        } else {
            prompt.tokens_per_s(512)
        };
        let generation = token(&target, &shape, 256).tokens_per_s(1);
        for (reckoned, published) in [(prompt, speed.prompt), (generation, speed.generation)] {
            let ratio = reckoned / published.parse::<f64>().unwrap();
            let line = format!("{} {reckoned:.1} of {published}: {ratio:.3}", sizes.arch);
            println!("{line}");
            if !(0.8..1.2).contains(&ratio) {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Without the NPU, as the planner has a single token of 4-bit weights.
#[test]
fn published_generation_of_the_cpu_is_met() {
    let q4_0 = GgmlType::from_number(2).unwrap();
    let target = target(&caps::RK3588);
    for sizes in [GEMMA3, MINISTRAL3] {
        let known = (sizes.arch, sizes.layers, sizes.embed);
        let speed = speeds(known, "rk3588").find(|speed| speed.weight == "Q4_0");
        let published: f64 = speed.unwrap().generation.parse().unwrap();
        let reckoned = token(&target, &shape(&sizes, q4_0), 256).tokens_per_s(1);
        let ratio = reckoned / published;
        println!("{} {reckoned:.1} of {published}: {ratio:.3}", sizes.arch);
        assert!(
            (0.8..1.2).contains(&ratio),
            "{}: {reckoned} {published}",
            sizes.arch
        );
    }
}

#[test]
fn longer_contexts_are_never_faster_and_the_planner_s_attention_is_never_slower() {
    let types = [1, 2, 8].map(|number| GgmlType::from_number(number).unwrap());
    for caps in caps::ALL {
        let target = target(caps);
        for dtype in types {
            let shape = shape(&QWEN2, dtype);
            let mut last = [f64::INFINITY; 4];
            for context in [512, 1024, 4096, 16384] {
                let prompt = StepNs::of_prompt(&target, &shape, context, 512);
                let npu = prompt.tokens_per_s(context);
                let [slow, fast] = prompt.cpu_attention_tokens_per_s(context);
                assert!(npu >= fast && fast > slow, "{context}");
                let speeds = [
                    npu,
                    fast,
                    slow,
                    token(&target, &shape, context).tokens_per_s(1),
                ];
                let is_slower = speeds.iter().zip(last).all(|(speed, last)| *speed < last);
                let chip = caps.soc.name();
                assert!(is_slower, "{chip} {dtype:?} {context}: {speeds:?} {last:?}");
                last = speeds;
            }
        }
    }
}

/// 4-bit weights are multiplied by the CPU for a single token, which reads half of the bytes.
#[test]
fn a_token_reads_4_bit_weights_on_the_cpu() {
    let target = target(&caps::RK3588);
    let of = |number| {
        let shape = shape(&MINISTRAL3, GgmlType::from_number(number).unwrap());
        token(&target, &shape, 256)
    };
    let (q4_0, q8_0) = (of(2), of(8));
    assert!(q4_0.host == 0.0 && q8_0.host > 0.0);
    assert!(q4_0.products < q8_0.products);
}
