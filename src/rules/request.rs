//! What an API body is for, read without the rest of it: which rule, what is to be done with it, and with which
//! endpoints.

use crate::fields::{Dialect, Fields, Node, Problem, Report};

use super::check::read_key;
use super::{Host, RuleKey, endpoints};

/// `oper`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oper {
    /// 0: the body is the whole rule.
    Replace,
    /// 1: the body's endpoints come to the rule's.
    Attach,
    /// 2: the body's endpoints leave the rule.
    Detach,
}

/// What a body is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purpose {
    /// The rule.
    pub key: RuleKey,
    /// What is to be done.
    pub oper: Oper,
    /// What the endpoints of the body are known by, in its order.
    pub endpoints: Vec<(Host, u16)>,
}

/// Reads what a body is for.
///
/// # Errors
/// Everything about that which cannot be used.
pub fn purpose_of(node: &Node) -> Result<Purpose, Vec<Problem>> {
    let mut report = Report::new(Dialect::Api);
    let mut body = Fields::root(&mut report, node);
    let endpoints = body
        .tables(&mut report, "endpoints")
        .iter_mut()
        .map(|fields| (endpoints::read_host(fields, &mut report), endpoints::read_port(fields, &mut report)))
        .collect();
    let Some(mut fields) = body.table(&mut report, "serviceArguments") else {
        if report.is_usable() {
            body.invalid(&mut report, "serviceArguments", "missing: a rule needs externalIP, port and mode");
        }
        return Err(report.problems);
    };
    let oper = match fields.int_in(&mut report, "oper", super::ranges::OPER) {
        Some(1) => Oper::Attach,
        Some(2) => Oper::Detach,
        _ => Oper::Replace,
    };
    let key = read_key(&mut fields, &mut report);
    if report.is_usable() { Ok(Purpose { key, oper, endpoints }) } else { Err(report.problems) }
}
