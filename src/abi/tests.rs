//! Tests of the values that the C interface hands on to the backend. `tests/abi/` tests its
//! functions as C calls them.

use super::*;

/// Memory of a device that is not shared holds packed weights: its bytes mean nothing to the CPU.
#[test]
fn packed_memory_is_not_taken_for_the_host_s() {
    let mut options = hexagon_ops::sim::Options::new(75);
    options.coherence = hexagon_ops::sim::Coherence::Strict;
    let rpc = crate::hexagon::driver::FastRpc::simulate(options).unwrap();
    let options = crate::hexagon::Options {
        dsp: crate::hexagon::device::Domain::Cdsp,
        session: 0,
        repack: config::Repack::Weights,
        timeout: std::time::Duration::from_secs(20),
        address_bytes: None,
        threads: None,
        activations: crate::config::ActivationBits::Eight,
        power: hexagon_ops::wire::Power::Burst,
        serving: crate::hexagon::device::Serving::Caller,
        trace: None,
    };
    let caps = crate::hexagon::caps::by_arch(75).unwrap();
    let device = crate::hexagon::HexDevice::untested("HEX0", &rpc, caps, options).unwrap();
    let device = Arc::new(device);
    static HELD: AtomicUsize = AtomicUsize::new(0);
    let [packed, shared] = [false, true].map(|shared| NpuBuffer {
        buffer: Arc::clone(&device).allocate(4096, shared).unwrap(),
        _held: Held::new(&HELD, 4096),
        failed: AtomicBool::new(false),
    });
    // SAFETY: numbers, NULL pointers, and no function.
    let mut node: NpuNode = unsafe { std::mem::zeroed() };
    node.op = c"ADD".as_ptr();
    let [first, second, ..] = &mut node.src;
    for (tensor, buffer, offset) in [
        (&mut node.dst, &shared, 0),
        (first, &packed, 128),
        (second, &shared, 256),
    ] {
        tensor.dtype = NPU_DTYPE_F32;
        (tensor.ne, tensor.nb) = ([4, 1, 1, 1], [4, 16, 16, 16]);
        tensor.buffer = std::ptr::from_ref(buffer).cast_mut();
        tensor.data = std::ptr::with_exposed_provenance_mut(buffer.buffer.base() + offset);
    }
    // SAFETY: all that the node points to is there until the end.
    let node = unsafe { with_memory(&node) }.unwrap();
    let [Some(first), Some(second), None, ..] = node.operation.src else {
        panic!("two operands")
    };
    assert!(first.memory.is_none() && second.memory.is_some());
    assert_eq!((first.packed_offset, second.packed_offset), (128, 256));
    assert!(
        node.dst.is_some() && node.src.map(|handle| handle.is_some())[..3] == [true, true, false]
    );
}
