//! The self-test succeeds on every architecture, and refuses the device if any family of operations
//! gives a wrong result.

use ggml_rust_npu::error::Error;
use ggml_rust_npu::hexagon::HexDevice;
use ggml_rust_npu::hexagon::caps;
use ggml_rust_npu::hexagon::driver::FastRpc;
use ggml_rust_npu::hexagon::selftest;
use hexagon_ops::layout::WeightType;
use hexagon_ops::sim::parse_faults;

use super::common::*;

#[test]
fn a_wrong_result_of_each_family_of_operations_refuses_the_device_and_is_named() {
    let begin = |faults: &str| {
        let mut sim = strict(75);
        sim.faults = parse_faults(faults).unwrap();
        let rpc = FastRpc::simulate(sim).unwrap();
        let chip = caps::by_arch(75).unwrap();
        let device = HexDevice::start("HEX0", &rpc, chip, OPTIONS).map(drop);
        (device, rpc.stand_in().unwrap().submissions())
    };
    let (device, submissions) = begin("");
    device.unwrap();
    let device = device_with(strict(75), OPTIONS).unwrap();
    let products = selftest::FAMILIES[0].test(device.npu()).unwrap().len() as u64;
    let mut refused = Vec::new();
    // Only every second one, because each try computes everything before it.
    for nth in (1..3).chain((products..=submissions).step_by(2)) {
        match begin(&format!("dsp:{nth}=wrong")).0 {
            // That submission had no results: it only removed memory from the DSP's address space.
            Ok(()) => {}
            Err(error @ Error::SelfTest { .. }) => {
                let line = error.to_string();
                assert!(!line.contains('\n'), "{line}");
                let named = line.strip_prefix("self-test ").unwrap().split(':').next();
                refused.push(named.unwrap().to_owned());
            }
            Err(error) => panic!("submission {nth}: {error}"),
        }
    }
    refused.dedup();
    let families = selftest::FAMILIES.map(|family| family.name);
    assert_eq!(refused, families);
}

#[test]
fn every_operation_of_the_self_test_is_right_on_every_architecture() {
    for arch in [73, 75, 79, 81] {
        let device = device_with(strict(arch), OPTIONS).unwrap();
        for family in selftest::FAMILIES {
            for outcome in family.test(device.npu()).unwrap() {
                assert!(outcome.is_right(), "V{arch}: {outcome:?}");
            }
        }
    }
}

#[test]
fn the_self_test_multiplies_all_types_on_both_units_few_rows_and_long_ones() {
    let device = device_with(strict(75), OPTIONS).unwrap();
    let outcomes = selftest::FAMILIES[0].test(device.npu()).unwrap();
    let other_rows = ["Q4_0 M=5 ", "Q4_0 M=16 ", "Q4_0 M=33 ", "Q4_0 M=3 K=16384 "];
    let types = WeightType::ALL.iter().flat_map(|weight| {
        let rows = ["M=1 ", "M=2 ", "M=3 "];
        rows.map(|rows| format!("{weight} {rows}"))
    });
    for want in types.chain(other_rows.map(String::from)) {
        let is_there = outcomes.iter().any(|it| it.test.starts_with(&want));
        assert!(is_there, "no product {want}");
    }
}

/// Upstream's own backend is wrong for five rows and more on some boards with a V73.
// SOURCE: ggml-org/llama.cpp issue 26123.
#[test]
fn a_wrong_product_of_five_to_sixteen_rows_refuses_the_device_and_is_named() {
    let outcomes = {
        let device = device_with(strict(73), OPTIONS).unwrap();
        selftest::FAMILIES[0].test(device.npu()).unwrap()
    };
    for rows in ["Q4_0 M=5 ", "Q4_0 M=16 "] {
        let at = outcomes.iter().position(|it| it.test.starts_with(rows));
        let at = at.unwrap();
        // Between products, a submission may take memory out of the DSP's address space.
        let refused = (at + 1..=2 * at + 2).any(|nth| {
            let mut sim = strict(73);
            sim.faults = parse_faults(&format!("dsp:{nth}=wrong")).unwrap();
            let start = device_with(sim, OPTIONS).map(drop);
            start.is_err_and(|error| {
                error
                    .to_string()
                    .starts_with(&format!("self-test products: {rows}"))
            })
        });
        assert!(refused, "{rows} at {at}");
    }
}
