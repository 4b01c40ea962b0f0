//! Both ends of the command ring in one process: the host's [`Ring`] and the DSP's [`Server`], in
//! any order of steps. While the server reads its clock or waits, the host continues.
//!
//! ```text
//! input = slots, { step }     step = kind, then
//!   0..=4  writes a command; the last one of a submission, with a fence, if the next byte is even
//!   5, 6   publishes
//!   7..=9  collects a completion
//!   10     has the DSP serve, unless it does
//!   11     asks it to leave
//!   12     word: a word of the ring is overwritten (offset, value)
//! ```
//!
//! As long as nothing was overwritten, commands are completed in order, each once, and none is
//! lost.
#![no_main]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use ggml_rust_npu::hexagon::driver::ring::{Ring, SharedWords};
use ggml_rust_npu_fuzz::Input;
use hexagon_ops::hmx::Hmx;
use hexagon_ops::layout::Tile;
use hexagon_ops::rt::cache::Access;
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::{MAP_REFUSED, Platform, Server, State, Units};
use hexagon_ops::wire::{
    Command, ERROR_CALL, ERROR_RING, FENCE, Nop, RingLayout, STATUS_OK, Serve, Start, VERSION,
};
use libfuzzer_sys::fuzz_target;

const RING_FD: i32 = 100;

/// Most steps of the host while the DSP is in one call, which must not last for ever.
const STEPS: u32 = 4096;

/// A line of the ring.
#[repr(C, align(128))]
struct Line([AtomicU32; 32]);

/// Memory of the ring.
#[derive(Clone)]
struct Words(Rc<[Line]>);

impl SharedWords for Words {
    fn words(&self) -> &[AtomicU32] {
        let words = self.0.as_ptr().cast::<AtomicU32>();
        // SAFETY: lines are arrays of words, and are contiguous.
        unsafe { std::slice::from_raw_parts(words, self.0.len() * 32) }
    }

    fn clean(&self, bytes: Range<usize>) {
        assert!(bytes.end <= self.0.len() * 128);
    }

    fn invalidate(&self, bytes: Range<usize>) {
        assert!(bytes.end <= self.0.len() * 128);
    }
}

/// The host's end, with its own record of the ring.
struct Host {
    input: Vec<u8>,
    at: usize,
    ring: Ring<Words>,
    memory: Words,
    sequence: u64,
    /// Fences that were written, whether published or not, and are not collected.
    written: VecDeque<u64>,
    published: VecDeque<u64>,
    is_damaged: bool,
    wants_serve: bool,
}

impl Host {
    fn is_done(&self) -> bool {
        self.at >= self.input.len()
    }

    fn step(&mut self) {
        let bytes = self.input[self.at..].to_vec();
        let before = bytes.len();
        let mut input = Input::new(&bytes);
        match input.byte() % 13 {
            0..=4 => {
                let is_last = input.byte().is_multiple_of(2);
                let mut command = Command::new(self.sequence, &Nop { reserved: 0 });
                command.flags = if is_last { FENCE } else { 0 };
                match self.ring.push(&command) {
                    Ok(true) if is_last => {
                        self.written.push_back(self.sequence);
                        self.sequence = self.ring.next_sequence();
                    }
                    Ok(_) => {}
                    Err(error) => assert!(self.is_damaged, "{error}"),
                }
            }
            5 | 6 => {
                self.ring.publish();
                self.published.append(&mut self.written);
            }
            7..=9 => self.collect(),
            10 => self.wants_serve = true,
            11 => self.ring.close(),
            _ => {
                let words = self.memory.words();
                let at = input.word() as usize % words.len();
                words[at].store(input.word(), Ordering::Release);
                self.is_damaged = true;
            }
        }
        let left = input.rest().len();
        self.at += (before - left).max(1);
    }

    fn collect(&mut self) {
        match self.ring.collect() {
            Ok(Some(completion)) => {
                let want = self.published.pop_front();
                if !self.is_damaged {
                    assert_eq!(Some(completion.sequence), want);
                    assert_eq!(completion.status, STATUS_OK);
                }
            }
            Ok(None) => {}
            Err(error) => assert!(self.is_damaged, "{error}"),
        }
    }
}

struct System {
    host: Rc<RefCell<Host>>,
    now: u64,
    steps: u32,
}

impl System {
    /// Lets the host go on.
    fn turn(&mut self) {
        self.now += 500;
        self.steps += 1;
        let mut host = self.host.borrow_mut();
        if !host.is_done() && self.steps < STEPS {
            host.step();
        }
    }
}

impl Platform for System {
    fn map(&mut self, _fd: i32, _bytes: usize) -> Result<Mapped, u32> {
        Err(MAP_REFUSED)
    }

    fn unmap(&mut self, _mapped: Mapped) {}

    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared> {
        let host = self.host.borrow();
        if fd != RING_FD || bytes > host.memory.0.len() * 128 {
            return None;
        }
        let base = host.memory.0.as_ptr().cast_mut().cast();
        // SAFETY: the host keeps memory of this length and outlives the server; it is accessed by
        // words only.
        unsafe { Shared::new(base, bytes) }
    }

    fn invalidate(&mut self, _mapped: &Mapped, _range: Range<usize>, _access: Access) {
        panic!("nothing is mapped");
    }

    fn clean(&mut self, _mapped: &Mapped, _range: Range<usize>, _access: Access) {
        panic!("nothing is mapped");
    }

    fn time_us(&mut self) -> u64 {
        self.turn();
        self.now
    }

    fn packets(&mut self) -> u64 {
        0
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        self.turn();
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let [first, input @ ..] = bytes else { return };
    let slots = 1 << (first % 4);
    let layout = RingLayout::new(slots).expect("a power of two");
    let lines = layout.bytes().div_ceil(128);
    let memory = Words(
        (0..lines)
            .map(|_| Line([const { AtomicU32::new(7) }; 32]))
            .collect(),
    );
    let mut ring = Ring::new(memory.clone(), slots).expect("it is large enough");
    let host = Rc::new(RefCell::new(Host {
        input: input.to_vec(),
        at: 0,
        sequence: ring.next_sequence(),
        ring,
        memory,
        written: VecDeque::new(),
        published: VecDeque::new(),
        is_damaged: false,
        wants_serve: false,
    }));
    let vtcm = vec![Tile::ZERO; 4];
    let units = Units {
        hmx: Hmx::new(&vtcm),
        vtcm,
        threads: 1,
        arch: 75,
    };
    let system = System {
        host: Rc::clone(&host),
        now: 0,
        steps: 0,
    };
    let mut server = Server::new(system, units, Box::<State>::default());
    let start = Start {
        version: VERSION,
        fd: RING_FD,
        bytes: u32::try_from(layout.bytes()).expect("small"),
        threads: 1,
        power: 0,
        matrix: 1,
    };
    server.start(&start).expect("the ring is in order");
    // Returns `true` if the DSP can be called again.
    let mut serve = || {
        server.platform().steps = 0;
        let result = server.serve(&Serve {
            idle_us: 2000,
            reserved: 0,
        });
        let host = host.borrow();
        if let Err(code) = result {
            assert!(
                host.is_damaged && [ERROR_RING, ERROR_CALL].contains(&code),
                "{code:#x}"
            );
        }
        result.is_ok() && !host.ring.is_closed()
    };
    while !host.borrow().is_done() {
        host.borrow_mut().step();
        if std::mem::take(&mut host.borrow_mut().wants_serve) && !serve() {
            return;
        }
    }
    if host.borrow().is_damaged {
        return;
    }
    // Every published command must come back.
    while !host.borrow().published.is_empty() {
        if !serve() {
            return;
        }
        let mut host = host.borrow_mut();
        let due = host.published.len();
        host.collect();
        assert!(host.published.len() < due, "a submission got lost");
    }
});
