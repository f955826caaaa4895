//! What `kvlane doctor` found, as a table or as JSON.

use std::fmt;

use serde_json::{Value, json};

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// As it must be.
    Right,
    /// Not as it must be: the exit code is 1.
    Wrong,
    /// It cannot be told, or it is worth knowing and no fault.
    Unknown,
}

impl Mark {
    fn name(self) -> &'static str {
        match self {
            Mark::Right => "right",
            Mark::Wrong => "wrong",
            Mark::Unknown => "unknown",
        }
    }

    fn sign(self) -> char {
        match self {
            Mark::Right => '✓',
            Mark::Wrong => '✗',
            Mark::Unknown => '·',
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// What was looked at: a rule, an endpoint, a rank, a gateway.
    pub(super) subject: String,
    /// What was checked; a word that scripts may look for.
    pub(super) check: &'static str,
    /// What it came to.
    pub(super) mark: Mark,
    /// What was found.
    pub(super) says: String,
    /// What to do; empty where nothing need be done.
    pub(super) fix: String,
}

/// All lines, in the order in which they were found.
#[derive(Debug, Default)]
pub(super) struct Report {
    lines: Vec<Line>,
}

impl Report {
    pub(super) fn right(&mut self, subject: &str, check: &'static str, says: impl Into<String>) {
        self.add(subject, check, Mark::Right, says.into(), String::new());
    }

    pub(super) fn wrong(
        &mut self,
        subject: &str,
        check: &'static str,
        says: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(subject, check, Mark::Wrong, says.into(), fix.into());
    }

    /// Something that cannot be told; `fix` says what would tell it.
    pub(super) fn unknown(
        &mut self,
        subject: &str,
        check: &'static str,
        says: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(subject, check, Mark::Unknown, says.into(), fix.into());
    }

    fn add(&mut self, subject: &str, check: &'static str, mark: Mark, says: String, fix: String) {
        self.lines.push(Line { subject: subject.to_owned(), check, mark, says, fix });
    }

    /// Puts the lines of another behind these.
    pub(super) fn append(&mut self, mut other: Report) {
        self.lines.append(&mut other.lines);
    }

    /// Whether nothing is wrong.
    pub(super) fn is_right(&self) -> bool {
        self.lines.iter().all(|line| line.mark != Mark::Wrong)
    }

    pub(super) fn json(&self) -> Value {
        let line = |line: &Line| {
            json!({
                "subject": line.subject, "check": line.check, "mark": line.mark.name(), "says": line.says,
                "fix": line.fix,
            })
        };
        let checks: Vec<Value> = self.lines.iter().map(line).collect();
        json!({"right": self.is_right(), "checks": checks})
    }

    /// Subjects in the order of their first lines.
    fn subjects(&self) -> Vec<&str> {
        let mut subjects: Vec<&str> = Vec::new();
        for line in &self.lines {
            if !subjects.contains(&line.subject.as_str()) {
                subjects.push(&line.subject);
            }
        }
        subjects
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.lines.iter().map(|line| line.check.len()).max().unwrap_or(0);
        for subject in self.subjects() {
            writeln!(f, "{subject}")?;
            for line in self.lines.iter().filter(|line| line.subject == subject) {
                writeln!(f, "  {} {:width$}  {}", line.mark.sign(), line.check, line.says)?;
                if !line.fix.is_empty() {
                    let lead = if line.mark == Mark::Wrong { "fix" } else { "note" };
                    writeln!(f, "    {:width$}  {lead}: {}", "", line.fix)?;
                }
            }
        }
        let count = |mark: Mark| self.lines.iter().filter(|line| line.mark == mark).count();
        let (right, wrong, unknown) = (count(Mark::Right), count(Mark::Wrong), count(Mark::Unknown));
        write!(f, "{right} ✓, {wrong} ✗, {unknown} that cannot be told")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_mark_for_each_line_and_the_fix_for_what_is_wrong() {
        let mut report = Report::default();
        report.right("a", "reach", "answers");
        report.unknown("b", "events", "idle", "--probe");
        assert!(report.is_right(), "what cannot be told is no fault");
        report.wrong("a", "seed", "is 42", "set it");
        assert!(!report.is_right());
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "a",
                "  ✓ reach   answers",
                "  ✗ seed    is 42",
                "            fix: set it",
                "b",
                "  · events  idle",
                "            note: --probe",
                "1 ✓, 1 ✗, 1 that cannot be told",
            ]
        );
        assert_eq!(
            report.json()["checks"][2],
            json!({"subject": "a", "check": "seed", "mark": "wrong", "says": "is 42", "fix": "set it"})
        );
    }
}
