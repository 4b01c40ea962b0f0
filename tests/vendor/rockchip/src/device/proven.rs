//! Products that boards are known to compute, which are fewer than registers can specify.
//!
//! SOURCE: public notes of gregordinary (rows of a column, banks) and happyme531 (lines,
//! row-major); the buffer's size, CBUF_BANKS and CBUF_BANK_SIZE of rkt_ml.h, Mesa 25.3.

use super::Error;
use super::arithmetic::{GROUP_LINE_OFF, Operand};
use super::product::Product;
use super::register::Registers;

const BANKS: usize = 12;
const BANK_BYTES: usize = 32 * 1024;

/// Fails with the text of `what` unless `is_met`.
fn require(is_met: bool, what: impl FnOnce() -> String) -> Result<(), Error> {
    if is_met {
        return Ok(());
    }
    Err(Error::Unproven(what()))
}

/// Checks the buffer's banks, and the sizes.
///
/// # Errors
/// `Unproven`, or `Unwritten`.
pub fn check(registers: &Registers, product: &Product) -> Result<(), Error> {
    let Product {
        width,
        height,
        k,
        n,
        ..
    } = *product;
    let (rows, operand) = (product.positions(), product.arithmetic.operand);
    let kernel = product.arithmetic.operand_bytes(k);
    let is_packed = registers.get("CNA_CONV_CON1")? & GROUP_LINE_OFF == 0;
    // A single position counts as a line, because boards have run it in that form.
    let is_column = height > 1 && is_packed;

    let buffer = registers.get("CNA_CBUF_CON0")?;
    require(buffer >> 8 == 0, || {
        format!("CNA_CBUF_CON0 = {buffer:#x} has more than banks")
    })?;
    // CAST: four bits.
    let (data, weight) = ((buffer & 0xf) as usize, (buffer >> 4 & 0xf) as usize);
    require(weight > 0 && data + weight <= BANKS, || {
        format!("{data} banks of features and {weight} of weights")
    })?;
    let beyond = usize::from(is_column && operand == Operand::Int8);
    let need = (rows * kernel).div_ceil(BANK_BYTES) + beyond;
    require(data >= need, || {
        format!("{data} banks of features, {rows} rows of {kernel} bytes need {need}")
    })?;
    require(registers.get("CNA_CONV_CON2")? >> 4 > 0, || {
        "no line of features before the first product".into()
    })?;
    // CAST: usize has at least 32 bits.
    let entries = registers.get("CNA_CBUF_CON1")? as usize;
    require(entries == (width * kernel).div_ceil(64), || {
        format!("{entries} entries for a line of {} bytes", width * kernel)
    })?;
    require(kernel <= 32768, || format!("kernels of {kernel} bytes"))?;
    if is_column {
        require(rows.is_multiple_of(4) && rows <= 256, || {
            format!("{rows} rows in a column")
        })?;
        let need = (n * kernel).div_ceil(BANK_BYTES);
        require(n <= 256 && weight >= need, || {
            format!("{n} kernels, which need {need} of {weight} banks")
        })
    } else {
        let most = if height == 1 { 4 } else { 8 };
        require(operand == Operand::Int8, || {
            "lines, or row-major, in another arithmetic than INT8".into()
        })?;
        require(rows <= 128 && n <= 3072 && data <= most, || {
            format!("{rows} rows, {n} kernels, {data} banks of features")
        })
    }
}
