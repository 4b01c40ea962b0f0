//! Sizes whose products exceed the DSP's 32-bit words are refused there as in a 64-bit build. A
//! stride of 0 makes a huge tensor of a few bytes. Most of these tests can fail only in a build for
//! 32 bits (`make narrow`).

use bytemuck::Zeroable;
use hexagon_ops::serve::{self, Failure};
use hexagon_ops::wire::*;

use crate::driver::Host;
use crate::seed::tensor;

/// Returns a tensor whose rows repeat one element.
fn repeated(buffer: u32, dtype: u32, ne: [u32; 4]) -> Tensor {
    Tensor {
        nb: [0; 4],
        ..tensor(buffer, dtype, ne)
    }
}

/// Returns a host whose buffers 0, 1 and 2 have `bytes` bytes.
fn host(bytes: usize) -> Host {
    let mut host = Host::new();
    for _ in 0..3 {
        host.buffer(bytes);
    }
    host
}

/// Runs a command, and returns its status and detail.
fn answer<B: Body>(host: &mut Host, body: &B) -> (u32, u32) {
    let completion = host.run(&[Command::new(0, body)]);
    (completion.status, completion.detail)
}

fn bad(detail: u32) -> Failure {
    Failure {
        status: STATUS_BAD_COMMAND,
        detail,
    }
}

#[test]
fn an_indexer_of_very_long_keys_finds_no_vtcm() {
    let mut host = host(4096);
    for n in [1 << 25, 3 << 25, 1 << 27, 1 << 28, (1 << 31) - 1] {
        let narrow = |tensor: Tensor| NarrowTensor::new(&tensor).unwrap();
        let none = NarrowTensor::zeroed();
        let body = WideOp {
            kernel: KERNEL_LIGHTNING_INDEXER,
            reserved: 0,
            params: [0; 16],
            dst: narrow(tensor(2, TYPE_F32, [1; 4])),
            src: [
                narrow(repeated(0, TYPE_F32, [n, 1, 1, 1])),
                narrow(repeated(0, TYPE_F32, [n, 1, 1, 1])),
                narrow(tensor(1, TYPE_F32, [1; 4])),
                narrow(tensor(1, TYPE_F16, [1; 4])),
                none,
                none,
                none,
            ],
        };
        assert_eq!(serve::accepts_wide(&body), Ok(()), "{n}");
        assert_eq!(answer(&mut host, &body).0, STATUS_NO_VTCM, "{n}");
    }
}

#[test]
fn an_attention_of_very_long_keys_finds_no_vtcm() {
    let mut host = host(4096);
    for d in [1 << 28, 1 << 30, (1 << 31) - 1] {
        let body = Attention {
            scale: 1_f32.to_bits(),
            max_bias: 0,
            softcap: 0,
            reserved: 0,
            dst: tensor(2, TYPE_F32, [32, 1, 1, 1]),
            q: repeated(0, TYPE_F32, [d, 1, 1, 1]),
            k: repeated(0, TYPE_F32, [d, 1, 1, 1]),
            v: tensor(1, TYPE_F32, [32, 1, 1, 1]),
            mask: Zeroable::zeroed(),
            sinks: Zeroable::zeroed(),
        };
        assert_eq!(serve::accepts_attention(&body), Ok(()), "{d}");
        assert_eq!(answer(&mut host, &body).0, STATUS_NO_VTCM, "{d}");
    }
}

/// Filters times batch is 2^32 + 1.
#[test]
fn planes_that_no_word_can_count_are_no_result_of_a_convolution() {
    let mut host = host(4096);
    let narrow = |tensor: Tensor| NarrowTensor::new(&tensor).unwrap();
    let mut params = [1; 16];
    params[3..6].fill(0);
    let mut src = [NarrowTensor::zeroed(); WIDE_SOURCES];
    src[0] = narrow(repeated(0, TYPE_F32, [1, 1, 1, 641]));
    src[1] = narrow(repeated(1, TYPE_F32, [1, 1, 1, 6_700_417]));
    let body = WideOp {
        kernel: KERNEL_CONV_3D,
        reserved: 0,
        params,
        dst: narrow(tensor(2, TYPE_F32, [1; 4])),
        src,
    };
    assert_eq!(serve::accepts_wide(&body), Err(bad(serve::OPERAND)));
    let want = (STATUS_BAD_COMMAND, serve::OPERAND);
    assert_eq!(answer(&mut host, &body), want);
}

fn product(k: u32) -> TensorOp {
    TensorOp {
        kernel: KERNEL_MUL_MAT_UNPACKED,
        reserved: 0,
        params: [0; 16],
        dst: tensor(2, TYPE_F32, [1; 4]),
        src: [
            repeated(0, TYPE_F32, [k, 1, 1, 1]),
            repeated(1, TYPE_F32, [k, 1, 1, 1]),
            Zeroable::zeroed(),
        ],
    }
}

/// A kernel adds the elements that it reads at a time to an index of a row. With longer rows that
/// exceeds a word.
#[test]
fn dimensions_are_below_2_31() {
    let mut host = host(4096);
    assert_eq!(serve::accepts(&product((1 << 31) - 1)), Ok(()));
    for k in [1 << 31, u32::MAX - 127, u32::MAX] {
        let body = product(k);
        assert_eq!(serve::accepts(&body), Err(bad(serve::BOUNDS)), "{k}");
        let want = (STATUS_BAD_COMMAND, serve::BOUNDS);
        assert_eq!(answer(&mut host, &body), want, "{k}");
    }
}

fn pooling(plane: Tensor, size: [u32; 2], pad: [u32; 2]) -> TensorOp {
    let mut params = [0; 16];
    params[1..3].copy_from_slice(&size);
    params[3..5].fill(1);
    params[5..7].copy_from_slice(&pad);
    TensorOp {
        kernel: KERNEL_POOL_2D,
        reserved: 0,
        params,
        dst: tensor(2, TYPE_F32, [1; 4]),
        src: [plane, Zeroable::zeroed(), Zeroable::zeroed()],
    }
}

/// With a padding of 2^23 on each side, a window may have 2^24 elements in each dimension: hours of
/// work on one element.
#[test]
fn windows_of_padding_that_take_hours_are_refused() {
    let mut host = host(4096);
    let one = tensor(0, TYPE_F32, [1; 4]);
    let side = (1 << 24) - 1;
    let no_side = [0, side / 2];
    let all = [
        pooling(one, [side, side], [side / 2, side / 2]),
        pooling(one, [1, side], no_side),
        pooling(repeated(0, TYPE_F32, [1 << 24, 1, 1, 1]), [side, 1], [0; 2]),
    ];
    for (index, body) in all.iter().enumerate() {
        let refused = Err(bad(serve::OPERAND));
        assert_eq!(serve::accepts(body), refused, "{index}");
        let want = (STATUS_BAD_COMMAND, serve::OPERAND);
        assert_eq!(answer(&mut host, body), want, "{index}");
    }
    // A small window with much padding, and a window as large as its plane.
    let plane = tensor(0, TYPE_F32, [32, 32, 1, 1]);
    for body in [
        pooling(one, [99, 99], [49, 49]),
        pooling(plane, [32, 32], [0, 0]),
    ] {
        assert_eq!(answer(&mut host, &body), (STATUS_OK, 0));
    }
}
