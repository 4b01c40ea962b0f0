//! The part of the machine's memory that each device reports.

/// The free and total bytes of a machine's memory, or of a device's part in it.
pub type Share = (usize, usize);

/// Divides the memory of a machine among devices that use it together. llama.cpp adds up the
/// memory that devices report, so the parts add up to the machine's memory.
///
/// A device's part is the memory that it already holds, plus as much free memory as makes the parts
/// equal. A device that holds more than an equal part gets no free memory.
///
/// - `held`: bytes of the buffers of each device, which the machine's free bytes do not contain
/// - returns the free and total bytes of each device
#[must_use]
pub fn shares((free, total): Share, held: &[usize]) -> Vec<Share> {
    let free = free.min(total);
    let held = within(total - free, held);
    let level = level(free, &held);
    let parts: Vec<usize> = held
        .iter()
        .map(|held| level.saturating_sub(*held))
        .collect();
    let free = spread(free, &parts);
    // Memory that other programs use belongs to no device, so it is divided evenly among them.
    let used: usize = held.iter().sum();
    let others = spread(
        total - free.iter().sum::<usize>() - used,
        &vec![0; held.len()],
    );
    (free.iter().zip(&held).zip(others))
        .map(|((free, held), others)| (*free, free + held + others))
        .collect()
}

/// Returns the bytes that devices hold. If their sum is above `used`, all are reduced in
/// proportion, because memory that was allocated but not written yet counts as free.
fn within(used: usize, held: &[usize]) -> Vec<usize> {
    let sum: u128 = held.iter().map(|&held| held as u128).sum();
    let limit = (used as u128).min(sum);
    let part = |&held: &usize| usize::try_from(held as u128 * limit / sum.max(1)).unwrap_or(held);
    held.iter().map(part).collect()
}

/// Returns the size of a part such that the devices that hold less have `free` bytes left in all,
/// and at most these.
fn level(free: usize, held: &[usize]) -> usize {
    let mut sorted = held.to_vec();
    sorted.sort_unstable();
    let (mut level, mut sum) = (0, free);
    for (index, held) in sorted.iter().enumerate() {
        if index > 0 && level <= *held {
            break;
        }
        sum = sum.saturating_add(*held);
        level = sum / (index + 1);
    }
    level
}

/// Increases `parts` evenly until their sum is `bytes`; the first ones may get a byte more.
fn spread(bytes: usize, parts: &[usize]) -> Vec<usize> {
    let rest = bytes - parts.iter().sum::<usize>();
    let n = parts.len().max(1);
    (parts.iter().enumerate())
        .map(|(index, part)| part + rest / n + usize::from(index < rest % n))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn sums(shares: &[Share]) -> Share {
        let sum = |of: fn(&Share) -> usize| shares.iter().map(of).sum();
        (sum(|(free, _)| *free), sum(|(_, total)| *total))
    }

    #[test]
    fn shares_add_up_to_the_machine_s_memory() {
        for n in 1..10 {
            for machine in [
                (0, 0),
                (1, 7),
                (5 * GIB + 1, 16 * GIB + 3),
                (9 * GIB, 9 * GIB),
            ] {
                for held in [vec![0; n], (0..n).map(|i| i * GIB / 3 + i).collect()] {
                    let shares = shares(machine, &held);
                    assert_eq!(sums(&shares), machine, "{machine:?} {held:?}");
                    assert!(
                        shares.iter().all(|(free, total)| free <= total),
                        "{shares:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn one_device_has_the_whole_machine() {
        assert_eq!(shares((3, 8), &[2]), [(3, 8)]);
        assert_eq!(shares((3, 8), &[]), []);
    }

    #[test]
    fn sessions_that_hold_nothing_have_equal_parts() {
        assert_eq!(shares((8, 16), &[0; 4]), [(2, 4); 4]);
    }

    #[test]
    fn a_device_that_holds_more_has_less_left() {
        assert_eq!(shares((8, 16), &[4, 0]), [(2, 8), (6, 8)]);
        // The first device uses more than an equal part.
        assert_eq!(shares((2, 16), &[10, 0, 2]), [(0, 11), (2, 3), (0, 2)]);
    }

    #[test]
    fn memory_that_is_held_and_not_written_yet_is_no_one_s_twice() {
        let shares = shares((14, 16), &[6, 6]);
        assert_eq!(shares, [(7, 8), (7, 8)]);
    }
}
