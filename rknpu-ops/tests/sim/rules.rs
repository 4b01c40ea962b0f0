//! The requests that the library refuses, and their codes.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use rknpu_ops::ffi::{
    CoreMask, IoAttr, Layout, MatmulInfo, MatmulShape, MatmulType, MemSync, QUERY_SDK_VERSION,
    QuantParams, QuantType, SdkVersion, TensorAttr, error_name,
};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::Options;

use crate::common::{Mem, Npu, info};

const I8: MatmulType = MatmulType::I8_I8_I32;
const F16: MatmulType = MatmulType::F16_F16_F32;
const I4: MatmulType = MatmulType::I4_I4_I16;

#[test]
fn each_chip_has_its_types() {
    for (soc, want) in [
        (Soc::Rk3588, vec![1, 2, 3, 4, 9, 10]),
        (Soc::Rk3576, vec![1, 2, 4, 5, 7, 8, 11]),
        (Soc::Rk3562, vec![1, 2]),
        (Soc::Rk3566, vec![1, 2]),
    ] {
        let npu = Npu::new(soc);
        for number in 0..17 {
            let made = npu.create(info(MatmulType(number), [1, 64, 64]));
            let want = if want.contains(&number) {
                None
            } else {
                Some(-5)
            };
            assert_eq!(made.err(), want, "{soc:?} type {number}");
        }
    }
}

#[test]
fn shapes_are_checked() {
    for (soc, matmul_type, shape, want) in [
        (Soc::Rk3588, I8, [1, 48, 32], Some(-5)),
        (Soc::Rk3588, I8, [1, 32, 48], Some(-5)),
        (Soc::Rk3588, F16, [1, 32, 16], Some(-5)),
        (Soc::Rk3588, I4, [1, 32, 96], Some(-5)),
        (Soc::Rk3588, I4, [1, 32, 64], None),
        (Soc::Rk3566, F16, [1, 32, 16], None),
        (Soc::Rk3566, F16, [1, 16, 16], Some(-5)),
        (Soc::Rk3566, F16, [1, 32, 8], Some(-5)),
        (Soc::Rk3562, I8, [1, 10240, 16], None),
        (Soc::Rk3562, I8, [1, 10240 + 32, 16], Some(-5)),
        (Soc::Rk3588, I8, [1, 65536, 32], None),
        (Soc::Rk3588, I8, [1, 32, 87392], None),
        (Soc::Rk3588, F16, [1, 16896, 32], Some(-1)),
        (Soc::Rk3588, I8, [0, 32, 32], Some(-5)),
        (Soc::Rk3588, I8, [1, 0, 32], Some(-5)),
        (Soc::Rk3588, I8, [1, 32, 0], Some(-5)),
        (Soc::Rk3588, I8, [1 << 20, 8192, 32], Some(-5)),
    ] {
        let npu = Npu::new(soc);
        let made = npu.create(info(matmul_type, shape));
        assert_eq!(made.err(), want, "{soc:?} {matmul_type:?} {shape:?}");
        // Where creation fails with -1, the vendor's library ends the process.
        assert_eq!(npu.machine.locked_up().is_some(), want == Some(-1));
    }
    let npu = Npu::new(Soc::Rk3588);
    let mut negative = info(I8, [1, 32, 32]);
    negative.m = -1;
    assert_eq!(npu.create(negative).err(), Some(-5));
}

#[test]
fn documented_limits_are_enforced_on_request() {
    let mut options = Options::new(Soc::Rk3588);
    options.documented_limits = true;
    let npu = Npu::with(options);
    for (matmul_type, n, want) in [
        (I8, 4096, None),
        (I8, 4128, Some(-5)),
        (I4, 8192, None),
        (I4, 8256, Some(-5)),
    ] {
        assert_eq!(
            npu.create(info(matmul_type, [1, 32, n])).err(),
            want,
            "{matmul_type:?} {n}"
        );
    }
}

#[test]
fn layouts_and_quantization_are_checked() {
    let change = |soc, matmul_type, change: &dyn Fn(&mut MatmulInfo)| {
        let mut info = info(matmul_type, [1, 64, 64]);
        change(&mut info);
        Npu::new(soc).create(info).err()
    };
    let refused = Some(-5);
    let big = Soc::Rk3588;
    assert_eq!(change(big, I8, &|i| i.ac_layout = Layout::TP_NORM), refused);
    assert_eq!(change(big, I8, &|i| i.b_layout = Layout(3)), refused);
    assert_eq!(change(big, I8, &|i| i.b_layout = Layout::TP_NORM), None);
    assert_eq!(
        change(Soc::Rk3566, I8, &|i| i.b_layout = Layout::TP_NORM),
        refused
    );
    assert_eq!(
        change(big, I8, &|i| i.ac_quant_type = QuantType::PER_CHANNEL_SYM),
        refused
    );
    let per_channel = |i: &mut MatmulInfo| i.b_quant_type = QuantType::PER_CHANNEL_SYM;
    assert_eq!(change(big, I8, &per_channel), None);
    assert_eq!(change(big, MatmulType::I8_I8_F32, &per_channel), refused);
    assert_eq!(change(Soc::Rk3576, I8, &per_channel), refused);
    assert_eq!(change(Soc::Rk3562, I8, &per_channel), refused);
    let per_group = |i: &mut MatmulInfo| {
        i.b_quant_type = QuantType::PER_GROUP_SYM;
        i.group_size = 48;
    };
    assert_eq!(change(big, MatmulType::I8_I8_F32, &per_group), refused);
    assert_eq!(change(big, I8, &per_group), refused);
}

#[test]
fn core_masks_follow_the_chip() {
    for (soc, codes) in [
        (Soc::Rk3588, [0, 0, 0, 0, 0, 0, 0, -5]),
        (Soc::Rk3576, [0, 0, 0, -5, 0, 0, 0, -5]),
        (Soc::Rk3566, [-1; 8]),
    ] {
        let npu = Npu::new(soc);
        let (ctx, _) = npu.create(info(I8, [1, 32, 32])).unwrap();
        let masks = [0, 1, 2, 4, 3, 7, 0xffff, 5].map(CoreMask);
        // SAFETY: no pointers go in.
        let have = masks.map(|mask| unsafe { (npu.api.matmul_set_core_mask)(ctx, mask) });
        assert_eq!(have, codes, "{soc:?}");
    }
}

#[test]
fn dynamic_shapes_are_checked() {
    let npu = Npu::new(Soc::Rk3588);
    let request = info(I8, [1, 32, 32]);
    let shape = |m, n| MatmulShape { m, k: 32, n };
    assert_eq!(
        npu.create_dynamic(request, &mut [shape(1, 32), shape(2, 64)])
            .unwrap_err(),
        -5
    );
    assert_eq!(npu.create_dynamic(request, &mut []).unwrap_err(), -5);
    assert_eq!(
        npu.create_dynamic(request, &mut [shape(1, 32); 513])
            .unwrap_err(),
        -5
    );
    let (ctx, attrs) = npu
        .create_dynamic(request, &mut [shape(1, 32), shape(2, 32)])
        .unwrap();
    let mem = npu.mem(ctx, attrs[1].b.size).unwrap();
    // The attribute must belong to the current shape, and after a change of shape A and C must be
    // bound again.
    assert_eq!(npu.set(ctx, mem, attrs[1].a), -5);
    assert_eq!(npu.set(ctx, mem, attrs[0].a), 0);
    assert_eq!(npu.set_dynamic_shape(ctx, shape(2, 32)), 0);
    assert_eq!(npu.set(ctx, mem, attrs[1].a), 0);
}

#[test]
fn binding_is_checked_and_a_run_needs_all_three() {
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, attr) = npu.create(info(I8, [1, 64, 32])).unwrap();
    let [a, b, c] = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    assert_eq!(npu.run(ctx), -5);
    // A's memory is too small for B.
    assert_eq!(npu.set(ctx, a, attr.b), -5);
    assert_eq!(npu.set(ctx, a, TensorAttr::ZERO), -5);
    let mut wrong_size = attr.a;
    wrong_size.size += 1;
    assert_eq!(npu.set(ctx, b, wrong_size), -5);
    assert_eq!(npu.set(ctx, a, attr.a) | npu.set(ctx, b, attr.b), 0);
    assert_eq!(npu.run(ctx), -5);
    // C may be in B's memory.
    assert_eq!(npu.set(ctx, b, attr.c), 0);
    assert_eq!(npu.run(ctx), -5);
    assert_eq!(npu.set(ctx, c, attr.c), 0);
    assert_eq!(npu.run(ctx), 0);
}

#[test]
fn unknown_contexts_and_memories_are_refused() {
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, attr) = npu.create(info(I8, [1, 32, 32])).unwrap();
    let mem = npu.mem(ctx, 4096).unwrap();
    assert_eq!(npu.set(ctx, Mem(std::ptr::dangling_mut()), attr.a), -5);
    assert_eq!(
        npu.sync(ctx, Mem(std::ptr::dangling_mut()), MemSync::TO_DEVICE),
        -5
    );
    assert_eq!(npu.sync(ctx, mem, MemSync(0)), -5);
    assert_eq!(npu.destroy_mem(ctx, mem), 0);
    assert_eq!(npu.destroy_mem(ctx, mem), -5);
    assert!(npu.mem(ctx, 0).is_none());
    assert_eq!(npu.destroy(ctx), 0);
    assert_eq!(
        [npu.destroy(ctx), npu.run(ctx), npu.set(ctx, mem, attr.a)],
        [-7; 3]
    );
    assert!(npu.mem(ctx, 64).is_none());
    assert_eq!(error_name(-7), "RKNN_ERR_CTX_INVALID");
}

#[test]
fn null_pointers_are_refused() {
    let npu = Npu::new(Soc::Rk3588);
    let (mut ctx, mut attr, mut request) = (0, IoAttr::ZERO, info(I8, [1, 32, 32]));
    let (live, _) = npu.create(request).unwrap();
    let api = npu.api;
    // SAFETY: null is the tested case; the others point at objects of their types.
    let no_ctx = unsafe { (api.matmul_create)(null_mut(), &mut request, &mut attr) };
    // SAFETY: as above.
    let no_info = unsafe { (api.matmul_create)(&mut ctx, null_mut(), &mut attr) };
    // SAFETY: as above.
    let no_attr = unsafe { (api.matmul_create)(&mut ctx, &mut request, null_mut()) };
    // SAFETY: as above.
    let no_tensor = unsafe { (api.matmul_set_io_mem)(live, null_mut(), null_mut()) };
    // SAFETY: as above.
    let no_params = unsafe { (api.matmul_set_quant_params)(live, null_mut()) };
    // SAFETY: as above.
    let no_shape = unsafe { (api.matmul_set_dynamic_shape)(live, null_mut()) };
    // SAFETY: as above.
    let no_mem = unsafe { (api.destroy_mem)(live, null_mut()) };
    // SAFETY: as above.
    let no_answer = unsafe { (api.query)(live, QUERY_SDK_VERSION, null_mut(), 512) };
    let codes = [
        no_ctx, no_info, no_attr, no_tensor, no_params, no_shape, no_mem, no_answer,
    ];
    assert_eq!(codes, [-5; 8]);
}

#[test]
fn quantization_parameters_are_checked() {
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, attr) = npu.create(info(MatmulType::I8_I8_I8, [1, 32, 32])).unwrap();
    let set = |scale_len, zero_point: i32, name| {
        let (mut scale, mut zp) = ([1f32; 2], zero_point);
        let mut params = QuantParams {
            name,
            scale: scale.as_mut_ptr(),
            scale_len,
            zp: &mut zp,
            zp_len: 1,
        };
        // SAFETY: the arrays are at least as long as the given lengths.
        unsafe { (npu.api.matmul_set_quant_params)(ctx, &mut params) }
    };
    assert_eq!(set(1, 0, attr.b.name), 0);
    assert_eq!(set(0, 0, attr.b.name), -5);
    assert_eq!(set(2, 0, attr.b.name), -5);
    assert_eq!(set(1, 3, attr.b.name), -5);
    assert_eq!(set(1, 0, [0; 256]), -5);
}

#[test]
fn the_library_tells_its_versions() {
    let mut options = Options::new(Soc::Rk3588);
    options.driver_version = "0.9.2".to_owned();
    let npu = Npu::with(options);
    let (ctx, _) = npu.create(info(I8, [1, 32, 32])).unwrap();
    let mut version = SdkVersion {
        api_version: [1; 256],
        drv_version: [1; 256],
    };
    let pointer = (&raw mut version).cast::<c_void>();
    // SAFETY: the struct has 512 bytes.
    let codes = [(5, 512), (5, 100), (6, 512)]
        .map(|(command, size)| unsafe { (npu.api.query)(ctx, command, pointer, size) });
    assert_eq!(codes, [0, -5, -5]);
    let text = |bytes: [std::ffi::c_char; 256]| {
        let bytes = bytes.map(|c| c.to_ne_bytes()[0]);
        CStr::from_bytes_until_nul(&bytes)
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        text(version.api_version),
        "2.3.2 (429f97ae6b@2025-04-09T09:09:27)"
    );
    assert_eq!(text(version.drv_version), "0.9.2");
}
