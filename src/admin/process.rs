//! What the process uses of its host.

use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// One process in the reference's form, where every value is a text.
pub(super) async fn report() -> Response {
    // Two small files of the kernel's, which never block.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let memory = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    Json(json!({ "processAttr": [shown(&stat, &memory)] })).into_response()
}

fn shown(stat: &str, memory: &str) -> Value {
    // The name stands in brackets and may hold anything; what follows it is separated by blanks.
    let (_, rest) = stat.rsplit_once(')').unwrap_or_default();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |number: usize| fields.get(number).copied().unwrap_or_default();
    let ticks = [11, 12].map(|number| field(number).parse::<u64>().unwrap_or_default()).iter().sum::<u64>();
    let pages: Vec<u64> = memory.split_whitespace().filter_map(|pages| pages.parse().ok()).collect();
    let kilobytes = |at: usize| format!("{}", pages.get(at).copied().unwrap_or_default() * 4);
    // A tick is a hundredth of a second on every Linux that this runs on.
    let used = Duration::from_millis(ticks * 10);
    json!({
        "pid": std::process::id().to_string(),
        "user": "",
        "priority": field(15),
        "nice": field(16),
        "virtMemory": kilobytes(0),
        "residentSize": kilobytes(1),
        "sharedMemory": kilobytes(2),
        "status": field(0),
        "CPUUsage": "",
        "MemoryUsage": "",
        "time": format!("{}.{:02}", used.as_secs(), used.subsec_millis() / 10),
        "command": "kvlane",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_blanks_moves_nothing() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 0 0 0 0 0 250 51 0 0 20 -5 9 0 100 0 0";
        let shown = shown(stat, "100 50 25 0 0 0 0");
        assert_eq!((&shown["status"], &shown["priority"], &shown["nice"]), (&json!("S"), &json!("20"), &json!("-5")));
        assert_eq!((&shown["time"], &shown["residentSize"]), (&json!("3.01"), &json!("200")));
    }
}
