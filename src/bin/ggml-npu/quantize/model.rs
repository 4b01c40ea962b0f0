//! What a model's metadata say of its sizes.

use ggml_rust_npu::gguf::Header;

use crate::Failure;

/// Architectures whose tensors are known: what reads what.
pub const ARCHITECTURES: [&str; 4] = ["llama", "qwen2", "qwen3", "gemma3"];

/// Sizes of the attention.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub count: usize,
    /// Query heads that share a head of K and V.
    pub sharing: usize,
    /// Elements of a head of V.
    pub size: usize,
}

/// The architecture, if it is one of [`ARCHITECTURES`].
///
/// # Errors
/// Text that names it.
pub fn architecture(header: &Header) -> Result<&str, Failure> {
    let name = header
        .get("general.architecture")
        .and_then(|value| value.as_str());
    let name = name.ok_or("general.architecture is not set: this is no model")?;
    if ARCHITECTURES.contains(&name) {
        return Ok(name);
    }
    let known = ARCHITECTURES.join(", ");
    Err(format!("architecture {name} is not supported, only {known}").into())
}

/// A number of the architecture's, such as `block_count`.
///
/// # Errors
/// Text that names the key, if it is missing or 0.
pub fn number(header: &Header, key: &str) -> Result<usize, Failure> {
    let key = format!("{}.{key}", architecture(header)?);
    let number = header.get(&key).and_then(|value| value.as_usize());
    (number.filter(|number| *number > 0))
        .ok_or_else(|| format!("{key} is missing, or no number of at least 1").into())
}

/// Sizes of the attention.
///
/// # Errors
/// Text that says what does not fit.
pub fn heads(header: &Header) -> Result<Heads, Failure> {
    let count = number(header, "attention.head_count")?;
    let kv_heads = number(header, "attention.head_count_kv").unwrap_or(count);
    if !count.is_multiple_of(kv_heads) {
        return Err(format!("{count} heads cannot share {kv_heads} heads of K and V").into());
    }
    Ok(Heads {
        count,
        sharing: count / kv_heads,
        size: match number(header, "attention.value_length") {
            Ok(size) => size,
            Err(_) => number(header, "embedding_length")? / count,
        },
    })
}
