//! Attention that the library does not compute, or computes wrong.

use super::*;

/// A device whose library has faults, if it can be opened with them.
fn with_faults(faults: &str) -> Result<RkDevice> {
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.faults = sim::parse_faults(faults).unwrap();
    let device = RkDevice::untested(Rknn::simulate(options).unwrap(), &caps::RK3588)?;
    device.npu().prove_shapes();
    Ok(device)
}

/// The number of the first context that is made after a device was opened.
fn first_context() -> u32 {
    (1..100)
        .find(|n| with_faults(&format!("rknn_matmul_create:{n}=-1")).is_ok())
        .unwrap()
}

/// Computes a case, whose result must be right, and expects attention to be the CPU's and products
/// the device's after it.
fn computes_and_leaves(device: &RkDevice, case: &Case, what: &str) {
    let error = reference::nmse(&case.compute(device), &case.reference());
    assert!(error < NMSE, "{what}: {error:e}");
    let mut out = vec![0.0; case.q.len()];
    assert!(device.prefers_cpu(&case.node(&mut out).operation), "{what}");
    assert!(!device.npu().is_lost(), "{what}");
    device.self_test().unwrap();
}

#[test]
fn attention_that_the_library_refuses_is_the_cpus_from_then_on() {
    let case = two_shapes();
    let mut out = vec![0.0; case.q.len()];
    let node = case.node(&mut out);
    let first = first_context();
    for refused in first..first + 4 {
        // After one failure the caches are dropped and a second attempt succeeds.
        let device = with_faults(&format!("rknn_matmul_create:{refused}=-1")).unwrap();
        assert!(!device.prefers_cpu(&node.operation), "{refused}");
    }
    let device = with_faults(&format!("rknn_matmul_create:{}+=-1", first + 2)).unwrap();
    assert!(device.prefers_cpu(&node.operation));
    assert!(device.prefers_cpu(&node.operation));
}

/// Each fault hits one call amid those that make the contexts of attention.
#[test]
fn what_attention_cannot_make_leaves_products_to_the_device() {
    let case = two_shapes();
    let first = first_context();
    let faults = [
        format!("rknn_matmul_create:{}=-7", first + 5),
        format!("rknn_matmul_set_core_mask:{}=-1", first + 5),
    ];
    for fault in faults {
        computes_and_leaves(&with_faults(&fault).unwrap(), &case, &fault);
    }
}

#[test]
fn wrong_sums_of_attention_leave_products_to_the_device() {
    let case = two_shapes();
    for product in ["M64K64", "M64K2048", "M64K64,rknn_matmul_run:M64K2048"] {
        let fault = format!("rknn_matmul_run:{product}=0").replace(',', "=0,");
        computes_and_leaves(&with_faults(&fault).unwrap(), &case, &fault);
    }
}

#[test]
fn sums_of_zeros_prove_no_shape() {
    let mut case = two_shapes();
    let values = std::mem::take(&mut case.v);
    case.v = vec![f16::ZERO; values.len()];
    let device = with_faults("rknn_matmul_run:M64K2048=0").unwrap();
    assert!(case.compute(&device).iter().all(|value| *value == 0.0));
    case.v = values;
    computes_and_leaves(&device, &case, "after zeros");
}
