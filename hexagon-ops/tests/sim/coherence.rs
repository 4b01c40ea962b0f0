//! Strict coherence: a product is right with all cache operations, and wrong without any one of
//! them.

use hexagon_ops::layout::WeightType;
use hexagon_ops::sim::{Coherence, Options};
use hexagon_ops::wire::{Command, MatMul, Plain};

use crate::common::{Rng, nmse};
use crate::host::{Session, start};
use crate::product::{DST_OFFSET, Product};

const NMSE: f64 = 5e-4;

/// Runs a product on a chip with strict coherence, leaving out what `skip` names; the error.
fn error_without(skip: &str, weight: WeightType, m: usize, rng: &mut Rng) -> f64 {
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let product = Product::new(&mut session, weight, m, rng);
    product.load();
    let clean = |what: &str, memory: crate::host::Memory| {
        if what != skip {
            session.cache.clean(memory.base, memory.bytes);
        }
    };
    clean("weights", product.weights);
    clean("activations", product.act);
    let completion = session.run(&[product.command]);
    // Poison in activations makes the FP16 way overflow, which the DSP may notice by itself.
    assert!(completion.status == 0 || skip == "activations" || skip == "weights");
    if skip != "results" {
        let results = product.dst.at(DST_OFFSET);
        session.cache.invalidate(results, product.dst_bytes());
    }
    product.error()
}

#[test]
fn a_missing_cache_operation_of_the_host_spoils_the_result() {
    let mut rng = Rng::new();
    for weight in WeightType::ALL {
        for m in [1, 5] {
            let error = error_without("nothing", weight, m, &mut rng);
            assert!(error < NMSE, "{weight:?} M {m}: {error:e}");
            for skip in ["weights", "activations", "results"] {
                let error = error_without(skip, weight, m, &mut rng);
                // NaN is wrong, too.
                let right = error < 0.1;
                assert!(
                    !right,
                    "{weight:?} M {m} without cleaning {skip}: {error:e}"
                );
            }
        }
    }
}

#[test]
fn results_of_one_command_are_activations_of_the_next() {
    let mut rng = Rng::new();
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(79)
    });
    let mut session = Session::new(&machine, 79);
    session.start().unwrap();
    let product = Product::new(&mut session, WeightType::Q8_0, 3, &mut rng);
    product.load();
    session
        .cache
        .clean(product.weights.base, product.weights.bytes);
    session.cache.clean(product.act.base, product.act.bytes);
    // The second product reads 64 of the 120 results of the first, which the host never reads.
    let second = MatMul {
        m: 1,
        act: product.body.dst,
        dst: Plain {
            offset: 2048,
            ..product.body.dst
        },
        ..product.body
    };
    let completion = session.run(&[product.command, Command::new(0, &second)]);
    assert_eq!((completion.status, completion.done), (0, 2));
    session
        .cache
        .invalidate(product.dst.base, product.dst.bytes);
    assert!(product.error() < NMSE);
    let inputs: Vec<f32> = product.dst.get(DST_OFFSET, 64);
    let chained: Vec<f32> = product.dst.get(2048, product.n);
    assert!(nmse(&chained, &product.reference(&inputs)) < NMSE);
}

#[test]
fn what_the_host_wrote_beside_results_survives() {
    let mut rng = Rng::new();
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let product = Product::new(&mut session, WeightType::Q4_0, 1, &mut rng);
    product.load();
    for memory in [product.weights, product.act] {
        session.cache.clean(memory.base, memory.bytes);
    }
    for turn in 1..4_u8 {
        // In the lines of the first and the last result, and in those next to them.
        let end = DST_OFFSET + product.dst_bytes();
        let before = [turn; DST_OFFSET];
        let after = [turn; 200];
        product.dst.put(0, &before);
        product.dst.put(end, &after);
        session.cache.clean(product.dst.base, product.dst.bytes);
        assert_eq!(session.run(&[product.command]).status, 0);
        session
            .cache
            .invalidate(product.dst.base, product.dst.bytes);
        assert_eq!(product.dst.get::<u8>(0, DST_OFFSET), before);
        assert_eq!(product.dst.get::<u8>(end, 200), after);
        assert!(product.error() < NMSE);
    }
}
