//! Named values read out of TOML and JSON, with every problem reported instead of the first.
//!
//! A document of either form becomes one tree of [`Node`]s; [`Fields`] reads one table of it, name by name, and
//! [`Fields::finish`] reports the names nobody asked for. So an option is written once, where it is read: its name,
//! its type, its range and its default.
//!
//! **Invariant.** A value that could not be used has left a [`Problem`] in the [`Report`]; a caller may go on with a
//! default to find more of them, and must not use what it built while [`Report::is_usable`] is false.

#![forbid(unsafe_code)]

mod parse;

use std::fmt;
use std::ops::RangeInclusive;

pub use parse::{from_json, from_toml};

/// Where a document came from, which decides how strictly it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// A configuration file: names are exact, and unknown ones are problems.
    File,
    /// A request to the management API: names match without regard to case, nulls are absent, unknown names are
    /// tolerated with a warning, because the reference's clients send more than they mean.
    Api,
}

/// One value of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Line in the file, counted from 1; none in a request.
    pub line: Option<u32>,
}

#[cfg(test)]
thread_local! {
    /// Names that tables were asked for.
    static ASKED: std::cell::RefCell<std::collections::BTreeSet<String>> = std::cell::RefCell::default();
}

/// What a function comes to, and the names that it asks tables for.
#[cfg(test)]
pub(crate) fn asked<T>(read: impl FnOnce() -> T) -> (T, std::collections::BTreeSet<String>) {
    ASKED.take();
    let result = read();
    (result, ASKED.take())
}

impl Node {
    /// The value of a full name of tables and a name in the last of them, such as `shards.cores`.
    #[must_use]
    pub fn find(&self, key: &str) -> Option<&Node> {
        key.split('.').try_fold(self, |node, part| match &node.value {
            Value::Table(entries) => entries.iter().find(|(name, _)| name == part).map(|(_, node)| node),
            _ => None,
        })
    }
}

/// The kinds of value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// JSON's null: as if the name were absent.
    Null,
    /// True or false.
    Bool(bool),
    /// A whole number, also where JSON spells it `1.0`.
    Int(i64),
    /// Any other number, or a date: no option takes one. The text is as written.
    Other(String),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// Names and values in the order of the document.
    Table(Vec<(String, Node)>),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Int(_) => "a whole number",
            Value::Other(_) => "a value that is no whole number",
            Value::Text(_) => "a text",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Bool(b) => write!(f, "{b}"),
            Value::Int(i) => write!(f, "{i}"),
            Value::Other(text) => write!(f, "{text}"),
            Value::Text(text) => write!(f, "{text:?}"),
            Value::Null | Value::List(_) | Value::Table(_) => f.write_str(self.kind()),
        }
    }
}

/// What kind of answer a problem deserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value is wrong and stays wrong (HTTP 400).
    Invalid,
    /// The value is right, and this version does not do it yet (HTTP 501).
    NotYet,
}

/// One thing that is wrong with a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What kind of answer it deserves.
    pub kind: Kind,
    /// Line in the file, counted from 1, where known.
    pub line: Option<u32>,
    /// Full name of the value, as in `rule[0].endpoints[2].weight`.
    pub key: String,
    /// What is wrong, with the value and what is expected.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.key, self.message) }
    }
}

/// Everything found in one document.
#[derive(Clone, Debug)]
pub struct Report {
    /// How strictly the document is read.
    pub dialect: Dialect,
    /// What keeps it from being used.
    pub problems: Vec<Problem>,
    /// What its author should know.
    pub warnings: Vec<Problem>,
}

impl Report {
    /// An empty report.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Report { dialect, problems: Vec::new(), warnings: Vec::new() }
    }

    /// Whether nothing was found that keeps the document from being used.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.problems.is_empty()
    }
}

/// One table of a document while it is read.
#[derive(Debug)]
pub struct Fields<'a> {
    entries: &'a [(String, Node)],
    taken: Vec<bool>,
    path: String,
    line: Option<u32>,
    any_case: bool,
}

const EMPTY: &[(String, Node)] = &[];

impl<'a> Fields<'a> {
    /// The document's outermost table; a document that is something else is a problem and reads as empty.
    #[must_use]
    pub fn root(report: &mut Report, node: &'a Node) -> Self {
        Self::table_at(report, node, String::new())
    }

    fn table_at(report: &mut Report, node: &'a Node, path: String) -> Self {
        let any_case = report.dialect == Dialect::Api;
        let entries = match &node.value {
            Value::Table(entries) => entries.as_slice(),
            other => {
                let message = format!("expected a table, found {}", other.kind());
                report.problems.push(Problem { kind: Kind::Invalid, line: node.line, key: path.clone(), message });
                EMPTY
            }
        };
        Fields { entries, taken: vec![false; entries.len()], path, line: node.line, any_case }
    }

    fn position(&self, name: &str) -> Option<usize> {
        let exact = self.entries.iter().position(|(key, _)| key == name);
        let any_case = || self.entries.iter().position(|(key, _)| key.eq_ignore_ascii_case(name));
        exact.or_else(|| if self.any_case { any_case() } else { None })
    }

    /// Where the table begins; none in a request.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        self.line
    }

    /// Full name of a value of this table.
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The value as it stands in the document, now counted as known; none where absent or null.
    pub fn take(&mut self, name: &str) -> Option<&'a Node> {
        #[cfg(test)]
        ASKED.with_borrow_mut(|asked| asked.insert(name.to_owned()));
        let at = self.position(name)?;
        for (i, (key, _)) in self.entries.iter().enumerate() {
            if i == at || (self.any_case && key.eq_ignore_ascii_case(name)) {
                self.taken[i] = true;
            }
        }
        let node = &self.entries[at].1;
        if node.value == Value::Null { None } else { Some(node) }
    }

    fn problem_here(&self, kind: Kind, name: &str, message: String) -> Problem {
        let line = self.position(name).map_or(self.line, |at| self.entries[at].1.line);
        Problem { kind, line, key: self.key(name), message }
    }

    /// Reports that a value cannot be used.
    pub fn invalid(&self, report: &mut Report, name: &str, message: impl Into<String>) {
        report.problems.push(self.problem_here(Kind::Invalid, name, message.into()));
    }

    /// Reports that this version does not do what a value asks for.
    pub fn not_yet(&self, report: &mut Report, name: &str, message: impl Into<String>) {
        report.problems.push(self.problem_here(Kind::NotYet, name, message.into()));
    }

    /// Tells the author something about a value that is used all the same.
    pub fn warn(&self, report: &mut Report, name: &str, message: impl Into<String>) {
        report.warnings.push(self.problem_here(Kind::Invalid, name, message.into()));
    }

    fn wrong_type(&self, report: &mut Report, name: &str, found: &Value, expected: &str) {
        self.invalid(report, name, format!("expected {expected}, found {} ({found})", found.kind()));
    }

    /// A whole number of any size.
    pub fn int(&mut self, report: &mut Report, name: &str) -> Option<i64> {
        match &self.take(name)?.value {
            Value::Int(i) => Some(*i),
            other => {
                self.wrong_type(report, name, other, "a whole number");
                None
            }
        }
    }

    /// A whole number within a range.
    pub fn int_in(&mut self, report: &mut Report, name: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let value = self.int(report, name)?;
        if range.contains(&value) {
            return Some(value);
        }
        self.invalid(report, name, format!("{value} is not within {} to {}", range.start(), range.end()));
        None
    }

    /// True or false.
    pub fn flag(&mut self, report: &mut Report, name: &str) -> Option<bool> {
        match &self.take(name)?.value {
            Value::Bool(b) => Some(*b),
            other => {
                self.wrong_type(report, name, other, "true or false");
                None
            }
        }
    }

    /// A text.
    pub fn text(&mut self, report: &mut Report, name: &str) -> Option<&'a str> {
        match &self.take(name)?.value {
            Value::Text(text) => Some(text),
            other => {
                self.wrong_type(report, name, other, "a text");
                None
            }
        }
    }

    /// A text that is not empty: an empty one counts as absent.
    pub fn text_set(&mut self, report: &mut Report, name: &str) -> Option<&'a str> {
        self.text(report, name).filter(|text| !text.is_empty())
    }

    /// A table inside this one.
    pub fn table(&mut self, report: &mut Report, name: &str) -> Option<Fields<'a>> {
        let node = self.take(name)?;
        Some(Self::table_at(report, node, self.key(name)))
    }

    /// A list of tables; empty where absent.
    pub fn tables(&mut self, report: &mut Report, name: &str) -> Vec<Fields<'a>> {
        let Some(node) = self.take(name) else { return Vec::new() };
        let Value::List(items) = &node.value else {
            self.wrong_type(report, name, &node.value, "a list of tables");
            return Vec::new();
        };
        let path = self.key(name);
        items.iter().enumerate().map(|(i, item)| Self::table_at(report, item, format!("{path}[{i}]"))).collect()
    }

    /// Reports the names that nobody asked for.
    pub fn finish(self, report: &mut Report) {
        for ((name, node), taken) in self.entries.iter().zip(&self.taken) {
            if *taken {
                continue;
            }
            let (list, message) = match report.dialect {
                Dialect::File => (&mut report.problems, "unknown key".to_owned()),
                Dialect::Api => (&mut report.warnings, "unknown member, ignored".to_owned()),
            };
            list.push(Problem { kind: Kind::Invalid, line: node.line, key: self.key(name), message });
        }
    }
}

#[cfg(test)]
mod tests;
