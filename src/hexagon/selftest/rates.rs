//! The speed of a device: two products whose packets and bytes are known, timed by the DSP's own
//! clock.
//!
//! | product of zeros | its time is that of |
//! |---|---|
//! | Q8_0, one row, activations of 8 bits | the weights from memory: 1088 bytes of a tile for 10 packets |
//! | Q2_K, two rows | the vector threads: 32 to 34 packets for the 336 bytes of a tile |
//!
//! A file keeps both speeds. Without it, a product near the border between two kernels would be
//! computed in one way today and in the other way tomorrow, with other digits.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use hexagon_ops::layout::{TILE_DIM, WeightType};
use hexagon_ops::ops::matmul::Dots;
use hexagon_ops::wire::Power;

use super::OneBufferProduct;
use crate::error::Result;
use crate::hexagon::caps::{self, HexRates};
use crate::hexagon::device::HexNpu;
use crate::hexagon::plan::cost;

pub mod kept;

/// Rows and columns of the weights: more bytes than the caches before the DSP have.
// SOURCE: the system cache of Snapdragon 8 Gen 3 has 12 MB (Qualcomm's product brief); a Q8_0
// weight of this size has 17.8 MB.
const SIZE: usize = 4096;

/// Times that a product is timed; the median counts.
const TIMES: usize = 5;

/// Plausible packets of a thread in a microsecond, or bytes in a nanosecond; rates beyond these are
/// errors, even on an emulator.
const PLAUSIBLE: RangeInclusive<f64> = 0.001..=100_000.0;

/// Returns the rates of a device that are kept in `file`, or measures them and keeps them there.
/// Without a file it returns [`caps::FITTED`]: with rates that are measured at each start, the same
/// question could have another answer each time. `name` is the device's name in log lines.
///
/// # Errors
/// As [`measure`], if it puts the device out of use.
pub fn of(npu: &HexNpu, name: &str, power: Power, file: Option<&Path>) -> Result<HexRates> {
    let key = kept::Key::new(npu.caps().name, npu.info().threads, power);
    let Some(file) = file else {
        return Ok(caps::FITTED);
    };
    if let Some(rates) = kept::read(file, &key, caps::FITTED) {
        return Ok(rates);
    }
    let rates = match measure(npu) {
        Ok(Some(rates)) => rates,
        Err(error) if npu.is_lost() => return Err(error),
        Ok(None) | Err(_) => {
            log::warn!("{name}: its speed could not be measured");
            return Ok(caps::FITTED);
        }
    };
    log::debug!(
        "{name}: {:.0} packets/us of each vector thread, {:.1} GB/s",
        rates.packets_per_us,
        rates.dma_gb_per_s
    );
    match kept::write(file, &key, &rates) {
        Ok(()) => Ok(rates),
        Err(error) => {
            log::debug!("{name}: {}: {error}", file.display());
            Ok(caps::FITTED)
        }
    }
}

/// Measures the rates of memory and of the vector threads. The matrix unit's is that of the chip
/// table.
///
/// Runs for a few milliseconds on a device. Returns `None` if the clock's values are impossible.
///
/// # Errors
/// `OutOfMemory`, or the error of a submission.
pub fn measure(npu: &HexNpu) -> Result<Option<HexRates>> {
    let memory = OneBufferProduct::new(WeightType::Q8_0, 1, SIZE, SIZE).with_dots(Dots::OneRow);
    let vector = OneBufferProduct::new(WeightType::Q2K, 2, SIZE, SIZE).with_dots(Dots::TwoRows);
    let [read, computed] = [time(npu, memory)?, time(npu, vector)?];
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let threads = f64::from(npu.info().threads.max(1));
    // CAST: both are far below 2^52.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let (bytes, tiles) = (
        memory.layout().matrix_bytes() as f64,
        (SIZE / TILE_DIM * (SIZE / TILE_DIM)) as f64,
    );
    let packets = tiles * cost::packets_of_dots(npu.caps().arch, WeightType::Q2K, 2);
    let rates = HexRates {
        dma_gb_per_s: bytes / (1e3 * us(read)),
        packets_per_us: packets / (us(computed) * threads),
        ..caps::FITTED
    };
    Ok(Some(rates).filter(is_plausible))
}

fn is_plausible(rates: &HexRates) -> bool {
    let rates = [rates.packets_per_us, rates.dma_gb_per_s];
    rates.iter().all(|rate| PLAUSIBLE.contains(rate))
}

/// Returns the median time of a product of zeros.
fn time(npu: &HexNpu, product: OneBufferProduct) -> Result<Duration> {
    let buffer = npu.allocate(product.bytes())?;
    buffer.write(0..product.bytes(), |out| out.fill(0));
    let batch = product.batch(&buffer);
    let submit = || npu.submit(&batch).map_err(|failed| failed.error);
    // The first submission also maps the memory, so it is not measured.
    submit()?;
    let mut times = [Duration::ZERO; TIMES];
    for time in &mut times {
        *time = submit()?;
    }
    times.sort_unstable();
    Ok(times[TIMES / 2])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hexagon_ops::sim;

    use super::*;
    use crate::config::ActivationBits;
    use crate::hexagon::device::{Domain, Floats, Serving, SessionOptions};
    use crate::hexagon::driver::FastRpc;

    /// Returns a stand-in whose products last at least `command_time`.
    fn npu(command_time: Duration) -> HexNpu {
        let options = sim::Options {
            command_time,
            ..sim::Options::new(75)
        };
        let rpc = FastRpc::simulate(options).unwrap();
        let caps = caps::by_arch(75).unwrap();
        let settings = SessionOptions {
            dsp: Domain::Cdsp,
            session: 0,
            timeout: Duration::from_secs(60),
            address_bytes: caps.address_bytes,
            threads: Some(1),
            power: Power::Burst,
            serving: Serving::Thread,
            floats: Floats::Usual,
            matrix: true,
        };
        HexNpu::open(&Arc::from("HEX0"), &rpc, caps, settings).unwrap()
    }

    #[test]
    fn a_slow_device_has_low_rates_which_stay_the_same_from_start_to_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rates");
        let of = |npu: &HexNpu| of(npu, "HEX0", Power::Burst, Some(&file)).unwrap();
        // 17.8 MB, and 16,384 tiles of 34.4 packets each, take at least 10 ms.
        let slow = npu(Duration::from_millis(10));
        let measured = of(&slow);
        assert!(
            measured.dma_gb_per_s < 1.79 && measured.packets_per_us < 57.0,
            "{measured:?}"
        );
        assert!(is_plausible(&measured), "{measured:?}");
        let kept = of(&npu(Duration::ZERO));
        let near = |have: f64, want: f64| (have - want).abs() <= 0.06;
        assert!(
            near(kept.packets_per_us, measured.packets_per_us),
            "{kept:?}"
        );
        assert!(near(kept.dma_gb_per_s, measured.dma_gb_per_s), "{kept:?}");
        assert_eq!(of(&slow), kept);

        // The measured rates in the file decide between kernels.
        let bits = |line: &str| {
            std::fs::write(&file, format!("hexagon-v75 threads=1 power=0 {line}\n")).unwrap();
            cost::dots(75, &of(&slow), 4, WeightType::Q4_0, ActivationBits::Auto)
        };
        assert_eq!(bits("packets_per_us=450 gb_per_s=45"), Dots::TwoDigits);
        assert_eq!(bits("packets_per_us=300 gb_per_s=45"), Dots::TwoRows);
    }

    #[test]
    fn rates_that_cannot_be_kept_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let npu = npu(Duration::from_millis(1));
        let of = |file| of(&npu, "HEX0", Power::Burst, file).unwrap();
        assert_eq!(of(None), caps::FITTED);
        // A file stands in the place of a folder.
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(of(Some(&file.join("rates"))), caps::FITTED);
    }
}
