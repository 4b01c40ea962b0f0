//! Proves that the command ring behaves as a plain queue does, whatever the order of steps on the
//! two sides, and that a peer that writes nonsense is found out. The peer is written from the
//! protocol's description alone.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ggml_rust_npu::hexagon::driver::ring::{Ring, RingError, SharedWords};
use hexagon_ops::wire::{self, Command, Completion, Nop, RingLayout};
use proptest::prelude::*;

/// The memory as the host sees it: its writes reach the peer after `clean`, and those of the peer
/// reach it after `invalidate`.
#[derive(Clone)]
struct Words {
    cache: Arc<[AtomicU32]>,
    memory: Arc<[AtomicU32]>,
}

impl Words {
    fn copy(from: &[AtomicU32], to: &[AtomicU32], bytes: Range<usize>) {
        let words = bytes.start / 4..bytes.end / 4;
        for (from, to) in from[words.clone()].iter().zip(&to[words]) {
            to.store(from.load(Ordering::Acquire), Ordering::Release);
        }
    }
}

impl SharedWords for Words {
    fn words(&self) -> &[AtomicU32] {
        &self.cache
    }

    fn clean(&self, bytes: Range<usize>) {
        Self::copy(&self.cache, &self.memory, bytes);
    }

    fn invalidate(&self, bytes: Range<usize>) {
        Self::copy(&self.memory, &self.cache, bytes);
    }
}

/// The other side, which reads commands and writes completions.
struct Peer {
    memory: Arc<[AtomicU32]>,
    layout: RingLayout,
    taken: u32,
    completed: u32,
}

impl Peer {
    fn load(&self, at: usize) -> u32 {
        self.memory[at / 4].load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u32) {
        self.memory[at / 4].store(value, Ordering::Release);
    }

    fn take(&mut self) -> Option<Command> {
        if self.load(wire::PUBLISHED) == self.taken {
            return None;
        }
        let at = self.layout.command(self.taken);
        let words: [u32; size_of::<Command>() / 4] = std::array::from_fn(|i| self.load(at + 4 * i));
        self.taken = self.taken.wrapping_add(1);
        self.store(wire::TAKEN, self.taken);
        Some(bytemuck::cast(words))
    }

    fn complete(&mut self, sequence: u64) {
        let completion = Completion {
            sequence,
            ..bytemuck::Zeroable::zeroed()
        };
        let at = self.layout.completion(self.completed);
        let words: [u32; 32] = bytemuck::cast(completion);
        for (i, word) in words.into_iter().enumerate() {
            self.store(at + 4 * i, word);
        }
        self.completed = self.completed.wrapping_add(1);
        self.store(wire::COMPLETED, self.completed);
    }
}

fn pair(slots: u32) -> (Ring<Words>, Peer) {
    let layout = RingLayout::new(slots).unwrap();
    let [cache, memory] = [0; 2].map(|_| {
        let words = (0..layout.bytes() / 4).map(|_| AtomicU32::new(7));
        Arc::from_iter(words)
    });
    let words = Words { cache, memory };
    let peer_memory = Arc::clone(&words.memory);
    let ring = Ring::new(words, slots).unwrap();
    let peer = Peer {
        memory: peer_memory,
        layout,
        taken: 0,
        completed: 0,
    };
    (ring, peer)
}

fn command(sequence: u64, fence: bool) -> Command {
    let mut command = Command::new(sequence, &Nop { reserved: 0 });
    command.flags = if fence { wire::FENCE } else { 0 };
    command.body[7] = u8::try_from(sequence % 251).unwrap();
    command
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Push { fence: bool },
    Publish,
    Take,
    Complete,
    Collect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => any::<bool>().prop_map(|fence| Step::Push { fence }),
        1 => Just(Step::Publish),
        3 => Just(Step::Take),
        2 => Just(Step::Complete),
        2 => Just(Step::Collect),
    ];
    let longest = if cfg!(miri) { 40 } else { 400 };
    prop::collection::vec(step, 1..longest)
}

/// Fewer under Miri, which is a thousand times slower.
const CASES: u32 = if cfg!(miri) { 4 } else { 256 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ring_is_a_queue(slots in prop::sample::select(vec![1u32, 2, 8]), steps in steps()) {
        let (mut ring, mut peer) = pair(slots);
        let (mut written, mut visible) = (VecDeque::new(), VecDeque::new());
        let mut numbers = 1..;
        // Fences that the peer has taken and not answered, answers that were not collected, and
        // fences in any state.
        let (mut owed, mut answers, mut fences) = (VecDeque::new(), VecDeque::new(), 0);
        for step in steps {
            match step {
                Step::Push { fence } => {
                    let sequence = ring.next_sequence();
                    prop_assert_eq!(Some(sequence), numbers.next());
                    let wanted = command(sequence, fence);
                    let room = written.len() + visible.len() < slots as usize
                        && !(fence && fences == slots as usize);
                    prop_assert_eq!(ring.push(&wanted), Ok(room));
                    if room {
                        fences += usize::from(fence);
                        written.push_back(wanted);
                    }
                }
                Step::Publish => {
                    ring.publish();
                    visible.append(&mut written);
                }
                Step::Take => {
                    let taken = peer.take();
                    prop_assert_eq!(taken, visible.pop_front());
                    owed.extend(taken.filter(|taken| taken.flags == wire::FENCE).map(|taken| taken.sequence));
                }
                Step::Complete => {
                    if let Some(sequence) = owed.pop_front() {
                        peer.complete(sequence);
                        answers.push_back(sequence);
                    }
                }
                Step::Collect => {
                    let collected = ring.collect().unwrap().map(|completion| completion.sequence);
                    fences -= usize::from(collected.is_some());
                    prop_assert_eq!(collected, answers.pop_front());
                }
            }
            prop_assert_eq!(ring.waiting(), Ok(u32::try_from(visible.len()).unwrap()));
        }
    }

    /// An impossible counter is an error, and has no other effect.
    #[test]
    fn impossible_counters_are_found_out(pushed in 0u32..8, taken in 0u32..8, value in any::<u32>(), completions in any::<bool>()) {
        let (mut ring, mut peer) = pair(8);
        for _ in 0..pushed {
            let sequence = ring.next_sequence();
            prop_assert!(ring.push(&command(sequence, true)).unwrap());
        }
        ring.publish();
        for _ in 0..taken.min(pushed) {
            let _ = peer.take();
        }
        let counter = if completions { wire::COMPLETED } else { wire::TAKEN };
        peer.store(counter, value);
        let possible = value <= pushed;
        let result = if completions { ring.collect().map(|_| ()) } else { ring.waiting().map(|_| ()) };
        if !possible {
            let is_counter = matches!(result, Err(RingError::Counter { .. }));
            prop_assert!(is_counter, "{:?}", result);
        } else if completions && value > 0 {
            // The slot was never written, so its sequence number is not the expected one.
            let is_sequence = matches!(result, Err(RingError::Sequence { have: 0, want: Some(1) }));
            prop_assert!(is_sequence, "{:?}", result);
        } else {
            prop_assert_eq!(result, Ok(()));
        }
    }
}

#[test]
fn slots_are_used_again_and_again() {
    let (mut ring, mut peer) = pair(2);
    let rounds = if cfg!(miri) { 10 } else { 100_000 };
    for _ in 0..rounds {
        let sequence = ring.next_sequence();
        assert!(ring.push(&command(sequence, true)).unwrap());
        ring.publish();
        let taken = peer.take().unwrap();
        peer.complete(taken.sequence);
        assert_eq!(ring.collect().unwrap().unwrap().sequence, sequence);
    }
}

#[test]
fn states_wishes_and_progress_are_the_words_of_the_protocol() {
    let (ring, peer) = pair(2);
    for (state, is_parked, is_closed) in [
        (wire::STATE_SERVING, false, false),
        (wire::STATE_PARKED, true, false),
        (wire::STATE_CLOSED, true, true),
    ] {
        peer.store(wire::STATE, state);
        assert_eq!((ring.is_parked(), ring.is_closed()), (is_parked, is_closed));
    }
    peer.store(wire::PROGRESS, 0x1234_5678);
    assert_eq!(ring.progress(), 0x1234_5678);
    assert_ne!(peer.load(wire::WISH), wire::WISH_CLOSE);
    ring.close();
    assert_eq!(peer.load(wire::WISH), wire::WISH_CLOSE);
}

#[test]
fn two_threads_pass_everything_in_order() {
    let (mut ring, mut peer) = pair(64);
    let total = if cfg!(miri) { 20 } else { 3_000 };
    let other = std::thread::spawn(move || {
        let mut next = 1;
        while next <= total {
            match peer.take() {
                Some(taken) => {
                    assert_eq!(taken, command(next, next % 3 == 0));
                    if next % 3 == 0 {
                        peer.complete(next);
                    }
                    next += 1;
                }
                None => std::thread::yield_now(),
            }
        }
    });
    let (mut pushed, mut collected) = (0, 0);
    while collected < total / 3 {
        if pushed < total
            && ring
                .push(&command(pushed + 1, (pushed + 1) % 3 == 0))
                .unwrap()
        {
            pushed += 1;
            ring.publish();
        }
        match ring.collect().unwrap() {
            Some(completion) => {
                collected += 1;
                assert_eq!(completion.sequence, 3 * collected);
            }
            None => std::thread::yield_now(),
        }
    }
    other.join().unwrap();
}

/// Each side stores, then loads the other side's store. If a load overtakes the store before it,
/// both sides may miss the other's store, and the DSP would sleep although there is a command. No
/// run shows this reliably, so this test looks at the code.
#[test]
fn between_publishing_and_looking_for_a_parked_dsp_there_is_a_full_fence() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/hexagon/driver/ring.rs");
    let code = std::fs::read_to_string(path).unwrap();
    let start = code.find("fn is_parked").unwrap();
    let body = &code[start..start + code[start..].find("\n    }").unwrap()];
    let steps: Vec<&str> = (body.lines().map(str::trim))
        .filter(|line| !line.starts_with("//") && !line.starts_with("fn"))
        .collect();
    let want = [
        "fence(Ordering::SeqCst);",
        "self.load(wire::STATE) != wire::STATE_SERVING",
    ];
    assert_eq!(steps, want);
}

/// `Some(60)` was shown.
#[test]
fn a_completion_that_is_not_due_is_said_in_plain_words() {
    let line = |want| RingError::Sequence { have: 5, want }.to_string();
    assert_eq!(
        line(Some(60)),
        "completion of submission 5, while 60 is due"
    );
    assert_eq!(line(None), "completion of submission 5, while none is due");
}
