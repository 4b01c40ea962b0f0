//! Commands that are in a buffer.

use hexagon_ops::serve::{BOUNDS, OPERAND, OPERATION, RESERVED, UNMAPPED};
use hexagon_ops::wire::{self, Command, Completion, List, Nop, TensorOp};

use crate::driver::{Host, Memory};

/// `x · factor` in place, `x` being four f32 at the start of a buffer.
fn scale(buffer: u32, factor: f32) -> Command {
    let x = wire::Tensor {
        buffer,
        dtype: wire::TYPE_F32,
        offset: 0,
        ne: [4, 1, 1, 1],
        nb: [4, 0, 0, 0],
    };
    let mut body = TensorOp {
        kernel: wire::KERNEL_SCALE,
        dst: x,
        ..bytemuck::Zeroable::zeroed()
    };
    body.params[0] = factor.to_bits();
    body.src[0] = x;
    Command::new(0, &body)
}

/// A host with `x` and a buffer for four commands.
struct Lists {
    host: Host,
    x: u32,
    x_memory: Memory,
    list: u32,
    list_memory: Memory,
}

const SLOTS: usize = 4;

impl Lists {
    fn new() -> Self {
        let mut host = Host::new();
        let (x, x_memory) = host.buffer(16);
        let (list, list_memory) = host.buffer(SLOTS * size_of::<Command>());
        Self {
            host,
            x,
            x_memory,
            list,
            list_memory,
        }
    }

    fn run(&mut self, commands: &[Command], list: List) -> Completion {
        self.x_memory.put(0, &[1.0_f32, 2.0, 3.0, 4.0]);
        self.list_memory.put(0, commands);
        self.host.run(&[Command::new(0, &list)])
    }

    fn list(&self, count: u32, offset: u64) -> List {
        List {
            buffer: self.list,
            count,
            offset,
        }
    }

    fn x(&self) -> Vec<f32> {
        self.x_memory.get(0, 4)
    }
}

#[test]
fn commands_of_a_list_are_carried_out_in_order_and_can_be_again() {
    let mut lists = Lists::new();
    let commands = [2.0, 3.0, 0.5].map(|factor| scale(lists.x, factor));
    for (count, offset, factor) in [
        (3, 0, 3.0),
        (2, 0, 6.0),
        (2, 512, 1.5),
        (0, 0, 1.0),
        (3, 0, 3.0),
    ] {
        let list = lists.list(count, offset);
        let completion = lists.run(&commands, list);
        assert_eq!(
            (completion.status, completion.done),
            (wire::STATUS_OK, count)
        );
        assert_eq!(lists.x(), [1.0, 2.0, 3.0, 4.0].map(|x: f32| x * factor));
    }
}

#[test]
fn a_command_that_fails_is_named_by_its_place_and_the_rest_is_skipped() {
    let mut lists = Lists::new();
    let wrong = Command::new(
        0,
        &TensorOp {
            kernel: wire::KERNEL_SCALE,
            ..bytemuck::Zeroable::zeroed()
        },
    );
    let commands = [scale(lists.x, 2.0), wrong, scale(lists.x, 3.0)];
    let before = Command::new(0, &Nop { reserved: 0 });
    lists.x_memory.put(0, &[1.0_f32; 4]);
    lists.list_memory.put(0, &commands);
    let list = Command::new(0, &lists.list(3, 0));
    let completion = lists.host.run(&[before, list]);
    assert_eq!(
        (completion.status, completion.detail),
        (wire::STATUS_BAD_COMMAND, OPERAND)
    );
    assert_eq!((completion.command, completion.done), (2, 2));
    assert_eq!(lists.x(), [2.0; 4]);
}

#[test]
fn what_a_list_cannot_hold_is_refused() {
    let mut lists = Lists::new();
    let good = scale(lists.x, 2.0);
    let changed = |change: fn(&mut Command)| {
        let mut command = good;
        change(&mut command);
        command
    };
    let inner = Command::new(0, &lists.list(1, 0));
    let cases = [
        ("a list", inner, OPERATION),
        (
            "a mapping",
            changed(|command| command.op = wire::OP_MAP),
            OPERATION,
        ),
        (
            "an unmapping",
            changed(|command| command.op = wire::OP_UNMAP),
            OPERATION,
        ),
        (
            "nothing",
            changed(|command| command.op = wire::OP_NOP),
            OPERATION,
        ),
        (
            "no operation",
            changed(|command| command.op = 77),
            OPERATION,
        ),
        (
            "a fence",
            changed(|command| command.flags = wire::FENCE),
            RESERVED,
        ),
        (
            "a number",
            changed(|command| command.sequence = 1),
            RESERVED,
        ),
    ];
    for (what, command, detail) in cases {
        let list = lists.list(2, 0);
        let completion = lists.run(&[command, good], list);
        let have = (completion.status, completion.detail, completion.command);
        assert_eq!(have, (wire::STATUS_BAD_COMMAND, detail, 0), "{what}");
        assert_eq!(lists.x(), [1.0, 2.0, 3.0, 4.0], "{what}");
    }
}

#[test]
fn a_list_outside_its_buffer_is_refused() {
    let mut lists = Lists::new();
    let good = scale(lists.x, 2.0);
    let unknown = List {
        buffer: 900,
        ..lists.list(1, 0)
    };
    for (list, detail) in [
        (lists.list(5, 0), BOUNDS),
        (lists.list(4, 512), BOUNDS),
        (lists.list(u32::MAX, 0), BOUNDS),
        (lists.list(1, u64::MAX), BOUNDS),
        (unknown, UNMAPPED),
    ] {
        let completion = lists.run(&[good; SLOTS], list);
        let have = (completion.status, completion.detail, completion.command);
        assert_eq!(have, (wire::STATUS_BAD_COMMAND, detail, 0), "{list:?}");
        assert_eq!(lists.x(), [1.0, 2.0, 3.0, 4.0], "{list:?}");
    }
}

/// While the DSP changes the word, the host waits longer.
#[test]
fn a_list_shows_the_host_that_it_makes_progress() {
    let mut lists = Lists::new();
    let commands = [scale(lists.x, 2.0); 3];
    for (passed_us, want) in [
        (30_000, 1),
        (5_000, 1),
        (16_000, 2),
        (10_000, 2),
        (60_000, 3),
    ] {
        lists.host.around().now += passed_us;
        let list = lists.list(3, 0);
        assert_eq!(lists.run(&commands, list).status, wire::STATUS_OK);
        assert_eq!(lists.host.shared.load(wire::PROGRESS), want);
    }
}
