//! Prints the structures and constants of C headers as Rust, with their sizes and offsets: test-kit
//! compares other crates' hand-written declarations with them.
//!
//! Usage: bindings HEADER... -- ARGUMENTS OF CLANG...     with the folder of libclang.so in LIBCLANG_PATH

use std::env;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let headers: Vec<String> = arguments.by_ref().take_while(|word| word != "--").collect();
    let made = bindgen::Builder::default()
        .headers(headers)
        .clang_args(arguments)
        // Values of enumerations keep their C names.
        .prepend_enum_name(false)
        .generate_comments(false)
        .formatter(bindgen::Formatter::Prettyplease)
        .generate();
    match made {
        Ok(made) => {
            print!("{made}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bindings: {error}");
            ExitCode::FAILURE
        }
    }
}
