use super::*;
use crate::graph::{PARAMS, Place, sources};
use crate::tensor::{DType, Shape};

/// A row of four floats.
fn row(role: Role) -> Tensor<'static> {
    Tensor {
        name: "row",
        dtype: DType::F32,
        format: None,
        shape: Shape {
            ne: [4, 1, 1, 1],
            nb: [4, 16, 16, 16],
        },
        place: Place::Device,
        role,
        memory: None,
        packed_offset: 256,
        dequantize: None,
    }
}

fn step(cost: Cost) -> Step {
    Step {
        node: 3,
        ops: [Some(Op::Mul), None, None],
        ne: [4, 1, 1, 1],
        cost,
    }
}

fn other_bytes(other_bytes: u64) -> Cost {
    Cost {
        other_bytes,
        ..Cost::default()
    }
}

#[test]
fn what_the_cpu_may_have_written_in_place_is_cleaned_and_what_it_may_read_is_invalidated() {
    let device = HexDevice::of_tests();
    let (shared, used, packed) = ((true, false), (true, true), (false, false));
    for ((shared, is_used), role, cleaned, cleaned_as_result) in [
        (packed, Role::Weights, false, false),
        (packed, Role::State, false, false),
        (packed, Role::Result, false, false),
        (shared, Role::Weights, true, true),
        (shared, Role::State, false, false),
        (shared, Role::Result, false, true),
        (used, Role::Weights, true, true),
        (used, Role::State, true, true),
        (used, Role::Result, false, true),
    ] {
        let buffer = HexBuffer::new(&device, 4096, shared).unwrap();
        if is_used {
            buffer.mark_cpu_reader();
        }
        let ranges = |name: fn(&mut Submission, &Tensor, &HexBuffer) -> u32| {
            let mut submission = Submission::default();
            let number = name(&mut submission, &row(role), &buffer);
            let [named] = &submission.named[..] else {
                panic!("one buffer is named")
            };
            assert_eq!(number, named.number);
            [&named.inputs, &named.results].map(|it| it.iter().collect::<Vec<_>>())
        };
        let row = |is_there: bool| Vec::from_iter(is_there.then_some(256..272));
        let what = format!("{role:?} of {shared}, {is_used}");
        assert_eq!(ranges(Submission::input), [row(cleaned), vec![]], "{what}");
        let want = [row(cleaned_as_result), row(cleaned_as_result)];
        assert_eq!(ranges(Submission::result), want, "{what}");
    }
}

#[test]
fn only_what_a_command_writes_into_an_unused_cache_is_shown() {
    let device = HexDevice::of_tests();
    let [shared, used, packed] =
        [true, true, false].map(|shared| HexBuffer::new(&device, 4096, shared).unwrap());
    used.mark_cpu_reader();
    let f16 = Tensor {
        dtype: DType::F16,
        ..row(Role::State)
    };
    // Returns two flags: whether the whole result is invalidated, and whether its rows are.
    let shown = |op, dst: Tensor<'static>, numbers, buffer: &HexBuffer| {
        let operation = Operation {
            op,
            params: [0; PARAMS],
            dst,
            src: sources(&[row(Role::Result), row(numbers)]),
        };
        let mut submission = Submission::default();
        submission.shows_cache(&operation, buffer, Some(&shared), false);
        let all = submission
            .named
            .iter()
            .any(|named| named.results.iter().count() > 0);
        (all, !submission.stored.is_empty())
    };
    let (cache, known, computed) = (row(Role::State), Role::State, Role::Result);
    for (op, dst, numbers, buffer, want) in [
        (Op::SetRows, cache, known, &shared, (false, true)),
        (Op::SetRows, cache, computed, &shared, (true, false)),
        (Op::SetRows, cache, known, &packed, (false, false)),
        (Op::SetRows, cache, known, &used, (false, false)),
        (
            Op::SetRows,
            row(Role::Result),
            known,
            &shared,
            (false, false),
        ),
        (Op::Rope, cache, known, &shared, (true, false)),
        (Op::Rope, row(Role::Weights), known, &shared, (false, false)),
        (Op::Cpy, f16, known, &shared, (true, false)),
        // Recurrent states.
        (Op::Cpy, cache, known, &shared, (false, false)),
        // A new sequence clears its state.
        (Op::Scale, cache, known, &shared, (true, false)),
    ] {
        let what = format!("{op:?} of {:?} {:?}", dst.role, dst.dtype);
        assert_eq!(shown(op, dst, numbers, buffer), want, "{what}");
    }
}

/// Regression: llama-eval-callback printed a state of a recurrence as it had been when it was
/// printed first.
#[test]
fn a_state_that_the_dsp_computed_is_shown_to_who_looks_at_nodes() {
    let device = HexDevice::of_tests();
    let buffer = HexBuffer::new(&device, 4096, true).unwrap();
    let operation = Operation {
        op: Op::Cpy,
        params: [0; PARAMS],
        dst: row(Role::State),
        src: sources(&[row(Role::Result)]),
    };
    for is_part in [false, true] {
        let want = Vec::from_iter(is_part.then_some(256..272));
        let mut submission = Submission::default();
        submission.shows_cache(&operation, &buffer, None, is_part);
        let [named] = &submission.named[..] else {
            panic!("one buffer is named")
        };
        assert_eq!(named.results.iter().collect::<Vec<_>>(), want);
        assert!(!buffer.is_used_by_cpu());
    }
}

#[test]
fn a_state_that_the_cpu_computed_tells_that_it_uses_the_buffer() {
    let device = HexDevice::of_tests();
    let cache = row(Role::State);
    let f16 = Tensor {
        dtype: DType::F16,
        ..cache
    };
    for (op, dst, from, is_told) in [
        (Op::Cpy, cache, Role::State, true),
        (Op::Cpy, cache, Role::Result, false),
        (Op::Cpy, f16, Role::State, false),
        (Op::Cpy, row(Role::Result), Role::State, false),
        (Op::Scale, cache, Role::State, false),
    ] {
        let operation = Operation {
            op,
            params: [0; PARAMS],
            dst,
            src: sources(&[row(from)]),
        };
        let buffer = HexBuffer::new(&device, 4096, true).unwrap();
        let mut submission = Submission::default();
        submission.shows_cache(&operation, &buffer, None, false);
        let what = format!("{op:?} of {from:?} to {:?} {:?}", dst.role, dst.dtype);
        assert_eq!(buffer.is_used_by_cpu(), is_told, "{what}");
        if is_told {
            let [named] = &submission.named[..] else {
                panic!("one buffer is named")
            };
            // Everything is invalidated, because an earlier command of the submission may have
            // copied another row without recording it.
            let want = [256..272, 0..4096].map(|range| vec![range]);
            let ranges = [&named.inputs, &named.results].map(|it| it.iter().collect::<Vec<_>>());
            assert_eq!(ranges, want, "{what}");
        }
    }
}

#[test]
fn memory_for_operands_and_commands_is_used_again_if_it_suffices() {
    let device = HexDevice::of_tests();
    let mut submission = Submission::default();
    let scratch = |submission: &mut Submission, bytes| {
        let buffer = submission.scratch(&device.npu, bytes).unwrap();
        (buffer.number(), buffer.bytes())
    };
    let (first, bytes) = scratch(&mut submission, 5000);
    let (second, _) = scratch(&mut submission, 5000);
    assert_ne!(first, second);
    submission.clear(0);
    assert_eq!(scratch(&mut submission, bytes), (first, bytes));
    submission.clear(0);
    let (_, more) = scratch(&mut submission, bytes + 1);
    assert!(more > bytes);

    let mut list = |commands: usize| {
        submission.clear(0);
        let command = bytemuck::Zeroable::zeroed();
        (0..commands).for_each(|_| submission.push(step(Cost::default()), command, &[second]));
        submission.record(&device.npu).unwrap();
        assert_eq!(submission.batch.is_recorded(), commands > 0);
        let list = submission.list.as_ref();
        list.map(|list| (list.number(), list.bytes() >= submission.batch.list_bytes()))
    };
    assert_eq!(list(0), None);
    let few = list(2);
    assert!(few.is_some());
    assert_eq!(list(1), few);
    let many = list(500);
    assert_eq!(many.map(|(_, suffices)| suffices), Some(true));
    assert_eq!(list(500), many);
}

#[test]
fn several_commands_cost_what_each_does() {
    let both = step(other_bytes(5)).then(step(other_bytes(7)));
    assert_eq!(both.cost.other_bytes, 12);
    assert_eq!(both.ops, [Some(Op::Mul), Some(Op::Mul), None]);
    let mut submission = Submission::default();
    for bytes in [5, 7] {
        let command = bytemuck::Zeroable::zeroed();
        submission.push(step(other_bytes(bytes)), command, &[1]);
    }
    assert_eq!(submission.cost().other_bytes, 12);
}
