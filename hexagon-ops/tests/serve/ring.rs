//! Submissions, idling and corrupt rings.

use hexagon_ops::rt::invoke::Call;
use hexagon_ops::serve::{self, COLLECT_US, SEQUENCE};
use hexagon_ops::wire::{
    COLLECTED, COMPLETED, Command, ERROR_CALL, ERROR_RING, ERROR_VERSION, FENCE, Info, MAGIC,
    METHOD_SERVE, METHOD_START, Nop, PUBLISHED, RingHeader, STATE, STATE_CLOSED, STATE_PARKED,
    STATUS_BAD_COMMAND, STATUS_OK, Serve, Start, TAKEN, Unmap, VERSION, WISH, WISH_CLOSE,
};

use crate::driver::{Host, Meanwhile, RING_FD};

fn nop(sequence: u64, flags: u32) -> Command {
    let mut command = Command::new(sequence, &Nop { reserved: 0 });
    command.flags = flags;
    command
}

#[test]
fn a_failure_skips_the_rest_of_its_submission_only() {
    let mut host = Host::new();
    let good = nop(0, 0);
    let wrong = Command::new(
        0,
        &Unmap {
            buffer: 3,
            reserved: 0,
        },
    );
    host.submit(&[good, good, wrong, wrong, good]);
    host.submit(&[good, good]);
    host.serve().unwrap();
    let first = host.collect().unwrap();
    assert_eq!((first.sequence, first.status), (1, STATUS_BAD_COMMAND));
    assert_eq!(
        (first.detail, first.command, first.done),
        (serve::UNMAPPED, 2, 2)
    );
    assert!(first.microseconds > 0 && first.packets > 0 && first.reserved == [0; 11]);
    let second = host.collect().unwrap();
    assert_eq!(
        (second.sequence, second.status, second.done),
        (2, STATUS_OK, 2)
    );
    assert_eq!(host.collect(), None);
}

#[test]
fn a_submission_may_arrive_in_parts() {
    let mut host = Host::new();
    host.publish(&[nop(1, 0)]);
    host.serve().unwrap();
    assert_eq!(host.collect(), None);
    host.publish(&[nop(1, 0), nop(1, FENCE)]);
    host.serve().unwrap();
    assert_eq!(host.collect().unwrap().done, 3);
}

#[test]
fn sequence_numbers_rise_and_stay_within_a_submission() {
    let mut host = Host::new();
    let mut run = |commands: &[Command]| {
        host.publish(commands);
        host.serve().unwrap();
        let completion = host.collect().unwrap();
        (completion.sequence, completion.detail, completion.command)
    };
    assert_eq!(run(&[nop(5, FENCE)]), (5, 0, 0));
    assert_eq!(run(&[nop(5, FENCE)]), (5, SEQUENCE, 0));
    assert_eq!(run(&[nop(4, FENCE)]), (4, SEQUENCE, 0));
    assert_eq!(run(&[nop(6, 0), nop(7, FENCE)]), (7, SEQUENCE, 1));
    assert_eq!(run(&[nop(u64::MAX, 0), nop(6, FENCE)]), (6, SEQUENCE, 1));
    assert_eq!(run(&[nop(6, 0), nop(6, FENCE)]), (6, 0, 0));
}

#[test]
fn counters_wrap_and_slots_are_used_again() {
    let mut host = Host::starting_at(4, u32::MAX - 5);
    for _ in 0..20 {
        let completion = host.run(&[nop(0, 0), nop(0, 0), nop(0, 0)]);
        assert_eq!((completion.status, completion.done), (STATUS_OK, 3));
    }
    assert_eq!(host.shared.load(TAKEN), 54);
}

#[test]
fn an_idle_ring_parks_and_resumes() {
    let mut host = Host::new();
    for _ in 0..3 {
        host.serve().unwrap();
        assert_eq!(host.shared.load(STATE), STATE_PARKED);
        let completion = host.run(&[nop(0, 0)]);
        assert_eq!(completion.status, STATUS_OK);
        // The times and packets are the command's own; the idle time before it was longer.
        assert!(completion.microseconds < 1000, "{completion:?}");
        assert!(completion.packets < 3000, "{completion:?}");
        assert_eq!(host.shared.load(STATE), STATE_PARKED);
    }
}

#[test]
fn a_wish_to_close_ends_the_session_and_unmaps() {
    let mut host = Host::new();
    host.buffer(4096);
    assert_eq!(host.around().mapped, 1);
    host.shared.store(WISH, WISH_CLOSE);
    host.submit(&[nop(0, 0)]);
    host.serve().unwrap();
    assert_eq!(host.shared.load(STATE), STATE_CLOSED);
    assert_eq!(host.collect(), None);
    assert_eq!(host.around().mapped, 0);
    assert_eq!(host.serve(), Err(ERROR_CALL));
    assert_eq!(host.start(), Err(ERROR_CALL));
}

#[test]
fn impossible_words_close_the_ring() {
    let spoil: [(usize, u32); 7] = [
        (PUBLISHED, 17),
        (PUBLISHED, u32::MAX),
        (PUBLISHED, 0x8000_0000),
        (COLLECTED, 1),
        (COLLECTED, u32::MAX - 16),
        (WISH, 2),
        (WISH, u32::MAX),
    ];
    for (word, value) in spoil {
        let mut host = Host::new();
        host.buffer(4096);
        // The counters are already at 1.
        let value = if word == WISH {
            value
        } else {
            value.wrapping_add(1)
        };
        if word == COLLECTED {
            host.submit(&[nop(0, 0)]);
        }
        host.shared.store(word, value);
        assert_eq!(host.serve(), Err(ERROR_RING), "{word}: {value:#x}");
        assert_eq!(host.shared.load(STATE), STATE_CLOSED);
        assert_eq!(host.around().mapped, 0);
        assert_eq!(host.serve(), Err(ERROR_CALL));
    }
}

#[test]
fn the_host_cannot_change_what_the_dsp_has_counted() {
    let mut host = Host::new();
    for word in [TAKEN, COMPLETED] {
        host.shared.store(word, 12345);
    }
    host.submit(&[nop(0, 0)]);
    host.serve().unwrap();
    assert_eq!(
        (host.shared.load(TAKEN), host.shared.load(COMPLETED)),
        (1, 1)
    );
}

#[test]
fn completions_that_nobody_collects_close_the_ring() {
    let mut host = Host::starting_at(2, 0);
    for _ in 0..2 {
        host.submit(&[nop(0, 0)]);
        host.serve().unwrap();
    }
    host.submit(&[nop(0, 0)]);
    assert_eq!(host.serve(), Err(ERROR_RING));
    assert_eq!(host.shared.load(STATE), STATE_CLOSED);
}

#[test]
fn a_platform_that_gives_up_ends_the_call() {
    let mut host = Host::new();
    host.around().answer = Some(-9);
    host.submit(&[nop(0, 0)]);
    assert_eq!(host.serve(), Err(-9));
    assert_eq!(host.collect(), None);
    assert_eq!(host.serve(), Err(ERROR_CALL));
}

#[test]
fn wrong_headers_are_no_rings() {
    let good = RingHeader {
        magic: MAGIC,
        version: VERSION,
        slots: 16,
        reserved: 0,
    };
    let wrong = [
        RingHeader { magic: 0, ..good },
        RingHeader {
            version: VERSION + 1,
            ..good
        },
        RingHeader { slots: 0, ..good },
        RingHeader { slots: 15, ..good },
        RingHeader { slots: 32, ..good },
        RingHeader {
            slots: 1 << 31,
            ..good
        },
        RingHeader {
            reserved: 1,
            ..good
        },
    ];
    for header in wrong {
        let mut host = Host::fresh(16);
        host.memory.put(0, &[header]);
        assert_eq!(host.start(), Err(ERROR_RING), "{header:?}");
        host.memory.put(0, &[good]);
        assert!(host.start().is_ok());
    }
    for (word, value) in [(PUBLISHED, 17), (COMPLETED, 17), (COLLECTED, 1)] {
        let mut host = Host::fresh(16);
        host.shared.store(word, value);
        assert_eq!(host.start(), Err(ERROR_RING), "{word}");
    }
}

#[test]
fn calls_are_checked() {
    let mut host = Host::fresh(16);
    assert_eq!(host.serve(), Err(ERROR_CALL));
    let start = Start {
        version: VERSION,
        fd: RING_FD,
        bytes: u32::try_from(host.layout.bytes()).unwrap(),
        threads: 1,
        power: 0,
        matrix: 1,
    };
    let mut call = |method, input: &[u8], out_bytes| {
        let mut output = vec![0; out_bytes];
        let call = Call {
            method,
            input,
            output: &mut output,
        };
        host.server.invoke(call).map(|()| output)
    };
    let info = size_of::<Info>();
    let of = |start: &Start| bytemuck::bytes_of(start).to_vec();
    for (changed, error) in [
        (
            Start {
                version: VERSION + 1,
                ..start
            },
            ERROR_VERSION,
        ),
        (Start { power: 3, ..start }, ERROR_CALL),
        (Start { fd: 99, ..start }, ERROR_RING),
        (
            Start {
                bytes: 100,
                ..start
            },
            ERROR_RING,
        ),
        (Start { bytes: 0, ..start }, ERROR_RING),
        (
            Start {
                bytes: start.bytes - 1,
                ..start
            },
            ERROR_RING,
        ),
        (
            Start {
                bytes: u32::MAX,
                ..start
            },
            ERROR_RING,
        ),
    ] {
        assert_eq!(call(METHOD_START, &of(&changed), info), Err(error));
    }
    let bytes = of(&start);
    assert_eq!(call(METHOD_START, &bytes[1..], info), Err(ERROR_CALL));
    assert_eq!(call(METHOD_START, &bytes, info - 1), Err(ERROR_CALL));
    assert_eq!(call(7, &bytes, info), Err(ERROR_CALL));
    let answer = call(METHOD_START, &bytes, info).unwrap();
    let answer: Info = bytemuck::pod_read_unaligned(&answer);
    assert_eq!((answer.version, answer.threads), (VERSION, 1));
    assert_eq!(call(METHOD_START, &bytes, info), Err(ERROR_CALL));
    let serve = |reserved| Serve {
        idle_us: 5,
        reserved,
    };
    let input = bytemuck::bytes_of(&serve(0)).to_vec();
    assert_eq!(call(METHOD_SERVE, &input, 0), Ok(Vec::new()));
    assert_eq!(call(METHOD_SERVE, &input, 1), Err(ERROR_CALL));
    assert_eq!(call(METHOD_SERVE, &input[..4], 0), Err(ERROR_CALL));
    let input = bytemuck::bytes_of(&serve(1)).to_vec();
    assert_eq!(call(METHOD_SERVE, &input, 0), Err(ERROR_CALL));
}

#[test]
fn a_completion_waits_for_room_in_the_ring() {
    let mut host = Host::starting_at(2, 0);
    for _ in 0..2 {
        host.submit(&[nop(0, 0)]);
        host.serve().unwrap();
    }
    host.submit(&[nop(0, 0)]);
    let ring = host.memory.shared();
    let mut polls = 0;
    host.around().meanwhile = Some(Meanwhile::new(move || {
        polls += 1;
        // One step before the ring counts as corrupt.
        if polls <= COLLECT_US / 998 - 2 {
            assert_eq!(
                ring.load(COMPLETED),
                2,
                "a completion was written over another one"
            );
        } else {
            ring.store(COLLECTED, 1);
        }
    }));
    assert_eq!(host.serve(), Ok(()));
    assert_eq!(host.shared.load(STATE), STATE_PARKED);
    for sequence in [2, 3] {
        assert_eq!(host.collect().unwrap().sequence, sequence);
    }
    assert_eq!(host.collect(), None);
}

#[test]
fn a_session_can_be_closed_while_a_completion_waits() {
    let words = [
        (WISH, WISH_CLOSE, Ok(())),
        (WISH, 2, Err(ERROR_RING)),
        (COLLECTED, 3, Err(ERROR_RING)),
    ];
    for (word, value, answer) in words {
        let mut host = Host::starting_at(2, 0);
        for _ in 0..2 {
            host.submit(&[nop(0, 0)]);
            host.serve().unwrap();
        }
        host.submit(&[nop(0, 0)]);
        let ring = host.memory.shared();
        let run = move || ring.store(word, value);
        host.around().meanwhile = Some(Meanwhile::new(run));
        let before = host.around().now;
        assert_eq!(host.serve(), answer, "{word}: {value}");
        assert!(host.around().now - before < 3000, "{word}: {value}");
        assert_eq!(host.shared.load(STATE), STATE_CLOSED);
        assert_eq!(host.shared.load(COMPLETED), 2);
    }
}
