use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// Returns the address of a server that runs as long as the process. `reply` makes the answer to a
/// path, with its head; with `is_endless` its last line comes again until nobody reads it.
pub(crate) fn serve(reply: impl Fn(&str) -> String + Send + 'static, is_endless: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream);
            let (mut request, mut length) = (String::new(), 0);
            reader.read_line(&mut request).unwrap();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let line = line.trim().to_ascii_lowercase();
                if let Some(number) = line.strip_prefix("content-length:") {
                    length = number.trim().parse().unwrap();
                }
                if line.is_empty() {
                    break;
                }
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            let reply = reply(request.split(' ').nth(1).unwrap());
            let mut stream = reader.into_inner();
            let mut is_read = stream.write_all(reply.as_bytes()).is_ok();
            let last = reply.trim_end().rsplit('\n').next().unwrap().to_owned() + "\r\n";
            while is_endless && is_read {
                is_read = stream.write_all(last.as_bytes()).is_ok();
            }
        }
    });
    url
}

/// Returns an answer with a body.
pub(crate) fn with_body(body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}")
}

/// Regression: a line whose length was one less than the limit made the limit of minreq 3.0 wrap
/// around. The header lines after it were read into memory until the time was over.
#[test]
fn answers_without_an_end_are_one_error() {
    let long = "x".repeat(8187);
    for (reply, is_endless) in [
        (format!("HTTP/1.1 200 OK\r\na: {long}\na: b\r\n"), true),
        ("HTTP/1.1 200 OK\r\na: b\r\n".into(), true),
        ("x".repeat(1 << 20), true),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}".into(),
            false,
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffff\r\n{".into(),
            false,
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx".into(),
            false,
        ),
        (String::new(), false),
    ] {
        let shown: String = reply.chars().take(60).collect();
        let url = serve(move |_| reply.clone(), is_endless);
        let begun = Instant::now();
        let error = LlamaServer::connect(&url, 60).unwrap_err();
        assert!(
            matches!(error, Error::Unreachable { .. }),
            "{shown:?}: {error}"
        );
        assert!(error.to_string().lines().count() == 1, "{shown:?}: {error}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{shown:?}");
    }
}

#[test]
fn a_server_has_no_more_slots_than_llama_server_may_have() {
    for (slots, used) in [(0, 1), (3, 3), (1_000_000_000, 256)] {
        let url = serve(move |_| with_body(&json!({"total_slots": slots})), false);
        assert_eq!(LlamaServer::connect(&url, 60).unwrap().slots(), used);
    }
}
