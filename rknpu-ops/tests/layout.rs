//! Native layouts: index formulas are bijections onto the buffers, and padding is exactly the rest.

use proptest::prelude::*;
use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::{Elem, MatmulLayout, NativeA, NativeB, NativeC, Soc};

/// Counts how often each element of a buffer of `len` is addressed; panics beyond the end.
fn hits(len: usize, indices: impl Iterator<Item = usize>) -> Vec<u8> {
    let mut hits = vec![0; len];
    indices.for_each(|index| hits[index] += 1);
    hits
}

fn every_layout() -> impl Iterator<Item = (Soc, MatmulType, MatmulLayout)> {
    Soc::ALL.into_iter().flat_map(|soc| {
        (1..16).filter_map(move |number| {
            let matmul_type = MatmulType(number);
            Some((soc, matmul_type, MatmulLayout::of(soc, matmul_type)?))
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_element_has_its_own_place(m in 1usize..9, k in 1usize..200, n in 1usize..150) {
        for (soc, matmul_type, layout) in every_layout() {
            let MatmulLayout { a, b, c, .. } = layout;
            let pairs = |x: usize, y: usize| (0..x).flat_map(move |i| (0..y).map(move |j| (i, j)));
            for (len, hits, used) in [
                (a.len(m, k), hits(a.len(m, k), pairs(m, k).map(|(i, j)| a.index(i, j, m))), m * k),
                (b.len(k, n), hits(b.len(k, n), pairs(k, n).map(|(i, j)| b.index(i, j, k, n))), k * n),
                (c.len(m, n), hits(c.len(m, n), pairs(m, n).map(|(i, j)| c.index(i, j, m))), m * n),
            ] {
                prop_assert!(hits.iter().all(|hit| *hit <= 1), "{soc:?} {matmul_type:?}");
                prop_assert_eq!(hits.iter().filter(|hit| **hit == 0).count(), len - used);
            }
            prop_assert_eq!(a.dims(m, k).iter().product::<usize>(), a.len(m, k));
            prop_assert_eq!(b.dims(k, n).iter().product::<usize>(), b.len(k, n));
            prop_assert_eq!(c.dims(m, n).iter().product::<usize>(), c.len(m, n));
        }
    }

    #[test]
    fn pieces_of_a_split_k_follow_one_another(k in 1usize..400, n in 1usize..70) {
        let b = NativeB { gn: 16, gk: 32, split_k: 96, elem: Elem::F16 };
        let mut offset = 0;
        for piece in 0..b.pieces(k) {
            let piece_k = b.piece_k(k, piece);
            for (ki, ni) in [(0, 0), (piece_k - 1, n - 1), (piece_k / 2, n / 2)] {
                let alone = b.index(ki, ni, piece_k, n);
                prop_assert_eq!(b.index(piece * 96 + ki, ni, k, n), offset + alone);
            }
            offset += b.len(piece_k, n);
        }
        prop_assert_eq!(offset, b.len(k, n));
    }
}

/// Places without an element are the tail of K in each column and the tail of N in the last strip.
#[test]
fn padding_is_the_tail_of_each_tile() {
    let b = NativeB {
        gn: 4,
        gk: 4,
        split_k: usize::MAX,
        elem: Elem::I8,
    };
    let (k, n) = (6, 5);
    let places = (0..k).flat_map(|ki| (0..n).map(move |ni| b.index(ki, ni, k, n)));
    let mask: String = hits(b.len(k, n), places)
        .iter()
        .map(|hit| if *hit == 1 { '#' } else { '.' })
        .collect();
    let want = concat!(
        "################", // columns 0..4, k 0..4
        "##..##..##..##..", // columns 0..4, k 4..6
        "####............", // column 4, k 0..4
        "##..............", // column 4, k 4..6
    );
    assert_eq!(mask, want);
}

#[test]
fn indices_are_those_of_the_vendor_guide() {
    let a = NativeA {
        s: 8,
        elem: Elem::F16,
    };
    // The second slice of 8 k starts after the 3 rows of the first.
    assert_eq!(
        [a.index(0, 7, 3), a.index(1, 0, 3), a.index(0, 8, 3)],
        [7, 8, 24]
    );
    let c = NativeC {
        t: 4,
        elem: Elem::F32,
    };
    assert_eq!([c.index(2, 3, 3), c.index(0, 4, 3)], [11, 12]);
    let b = MatmulLayout::of(Soc::Rk3588, MatmulType::I8_I8_I32)
        .unwrap()
        .b;
    let at = |k, n| b.index(k, n, 64, 64);
    assert_eq!(
        [at(1, 0), at(0, 1), at(32, 0), at(0, 32)],
        [1, 32, 1024, 2048]
    );
    assert_eq!(b.strip_len(64), 2048);
}

#[test]
fn the_table_has_the_vendors_numbers() {
    let tile = |soc, number| {
        let MatmulLayout {
            a, b, c, n_align, ..
        } = MatmulLayout::of(soc, MatmulType(number)).unwrap();
        (a.s, b.gn, b.gk, c.t, n_align)
    };
    assert_eq!(tile(Soc::Rk3588, 1), (8, 16, 32, 4, 32));
    assert_eq!(tile(Soc::Rk3588, 2), (16, 32, 32, 4, 32));
    assert_eq!(tile(Soc::Rk3588, 3), (16, 32, 32, 16, 32));
    assert_eq!(tile(Soc::Rk3588, 4), (8, 16, 32, 8, 32));
    assert_eq!(tile(Soc::Rk3588, 10), (32, 64, 32, 8, 64));
    assert_eq!(tile(Soc::Rk3576, 5), (8, 16, 32, 4, 32));
    assert_eq!(tile(Soc::Rk3576, 7), (8, 16, 32, 4, 32));
    assert_eq!(tile(Soc::Rk3576, 8), (8, 16, 32, 8, 32));
    assert_eq!(tile(Soc::Rk3576, 11), (16, 32, 32, 4, 32));
    assert_eq!(tile(Soc::Rk3562, 1), (8, 8, 32, 4, 16));
    assert_eq!(tile(Soc::Rk3562, 2), (16, 16, 32, 4, 16));
    assert_eq!(tile(Soc::Rk3566, 1), (4, 8, 16, 4, 16));
    assert_eq!(tile(Soc::Rk3566, 2), (8, 16, 32, 4, 16));
}

#[test]
fn four_bit_elements_share_bytes() {
    let b = MatmulLayout::of(Soc::Rk3588, MatmulType::I4_I4_I16)
        .unwrap()
        .b;
    assert_eq!(b.bytes(64, 64), 2048);
    assert_eq!(Elem::I4.bytes(3), 2);
}

#[test]
fn chips_are_found_by_name() {
    for soc in Soc::ALL {
        assert_eq!(Soc::from_name(soc.name()), Some(soc));
    }
    assert_eq!(Soc::from_name("RK3588S"), Some(Soc::Rk3588));
    assert_eq!(Soc::from_name("rk3568"), Some(Soc::Rk3566));
    assert_eq!(Soc::from_name("rk1808"), None);
}
