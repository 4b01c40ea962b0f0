//! Proves that running out of file descriptors is an error that names the limit, and passes with
//! its cause. A separate process, since the limit is one of the process.

mod common;

use common::{F32_IN_BLOCKS, Numbers, Weight, device_with, mul_mat, packed};
use ggml_rust_npu::error::Error;
use ggml_rust_npu::rockchip::RkBuffer;
use ggml_rust_npu::rockchip::caps;
use rknpu_ops::sim::{self, LiveObjects};
use rlimit::Resource;
use std::fs::File;
use std::sync::Arc;

#[test]
fn without_file_descriptors_there_is_an_error_that_names_the_limit() {
    let mut numbers = Numbers::new(41);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64 * 300);
    let options = sim::Options::new(caps::RK3588.soc);
    let (device, rknn) = device_with(options.clone(), &caps::RK3588).unwrap();
    // The next context fails with a code that does not mean a lack of memory.
    let next = rknn.stand_in().unwrap().calls("rknn_matmul_create") + 1;
    let faults = sim::parse_faults(&format!("rknn_matmul_create:{next}=-1")).unwrap();
    let refusing = [0, 3].map(|spare| {
        let options = sim::Options {
            faults: faults.clone(),
            ..options.clone()
        };
        let (device, _) = device_with(options, &caps::RK3588).unwrap();
        (packed(&device, &w, 0), device, spare)
    });
    let buffer = packed(&device, &w, 0);
    let multiply = |m: usize| {
        mul_mat(
            &device,
            &w,
            Some((&buffer, 0)),
            &act[..64 * m],
            [64, m, 1, 1],
        )
    };
    let before = multiply(1).unwrap();

    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let (old, hard) = Resource::NOFILE.get().unwrap();
    let limit = open + 2;
    Resource::NOFILE.set(limit, hard).unwrap();
    let names_the_limit = |error: &Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::OutOfDescriptors { .. }), "{text}");
        assert!(
            text.contains(&format!("too few of the {limit} file descriptors")),
            "{text}"
        );
    };

    // Opens files until no descriptor is left.
    let take_all = || std::iter::from_fn(|| File::open("/dev/null").ok()).collect::<Vec<_>>();

    // If descriptors run out, a new context gets those of cached contexts, even if a few are left
    // that are too few for it.
    Resource::NOFILE.set(limit + 3, hard).unwrap();
    for (home, device, spare) in refusing {
        let mut taken = take_all();
        taken.truncate(taken.len() - spare);
        let product = mul_mat(&device, &w, Some((&home, 0)), &act[..64], [64, 1, 1, 1]);
        assert_eq!(product.unwrap(), before, "{spare} left");
    }
    Resource::NOFILE.set(limit, hard).unwrap();

    // Loading weights uses up descriptors as well.
    let taken = take_all();
    let mut buffers = vec![RkBuffer::new(Arc::clone(&device), 4096).unwrap()];
    assert_eq!(multiply(1).unwrap(), before);
    // Loads until no descriptor is left.
    let error = loop {
        match RkBuffer::new(Arc::clone(&device), 4096) {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => break error,
        }
        assert!(buffers.len() < 100, "{} buffers", buffers.len());
    };
    names_the_limit(&error);
    // A device fails to start.
    names_the_limit(&device_with(options, &caps::RK3588).unwrap_err());
    // A multiplication that needs memory fails, because no cached context is left to free.
    let rest = take_all();
    names_the_limit(&multiply(300).unwrap_err());
    drop(rest);
    // Calls that need no new descriptor still succeed.
    buffers.clear();
    assert_eq!(multiply(1).unwrap(), before);
    let rest = take_all();
    assert_eq!(multiply(1).unwrap(), before);
    // A call that needs more memory for its operands gets the descriptors of cached contexts.
    let crowded = multiply(300).unwrap();
    drop((taken, rest));
    Resource::NOFILE.set(old, hard).unwrap();
    assert!(multiply(300).unwrap() == crowded);
    assert_eq!(multiply(1).unwrap(), before);

    drop((buffers, buffer, device));
    assert_eq!(rknn.stand_in().unwrap().live(), LiveObjects::default());
}
