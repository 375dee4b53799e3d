//! Rules of a fault store: `OPERATION=EFFECT[@OFFSET+LENGTH][#COUNT]`.

use byway_reactor::{ByteRange, Errno};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules, StoreSpec};

use super::text::Text;
use super::{SpecError, SpecFault, store};
use crate::limits::FAULT_RULES_MAX;
use crate::units::{parse_size, parse_time};

/// Operations and their names.
pub(super) const OPERATIONS: [(&str, FaultOperation); 7] = [
    ("any", FaultOperation::Any),
    ("read", FaultOperation::Read),
    ("write", FaultOperation::Write),
    ("flush", FaultOperation::Flush),
    ("trim", FaultOperation::Trim),
    ("zero", FaultOperation::Zero),
    ("extents", FaultOperation::Extents),
];

/// Errors that a rule can name: those that stores have, and that clients tell apart.
pub(super) const ERRORS: [(&str, Errno); 5] = [
    ("eio", Errno::IO),
    ("enospc", Errno::NOSPC),
    ("enomem", Errno::NOMEM),
    ("eperm", Errno::PERM),
    ("etimedout", Errno::TIMEDOUT),
];

/// Reads rules as long as parts look like `word=…`; what follows is the inner store.
pub(super) fn parse(text: &Text, depth: usize) -> Result<StoreSpec, SpecError> {
    let mut rules = Vec::new();
    let mut rest = text.clone();
    while let Some((part, behind)) = rest.split_once(':')
        && let Some((key, value)) = part.split_once('=')
        && key.is_word()
    {
        if rules.len() == FAULT_RULES_MAX {
            return Err(part.error(SpecFault::TooManyFaults("more than 16 rules; leave some out")));
        }
        rules.push(rule(&key, &value)?);
        rest = behind;
    }
    if rules.is_empty() {
        return Err(text.error(SpecFault::NoRule));
    }
    Ok(StoreSpec::Fault { inner: Box::new(store::parse(&rest, depth + 1)?), rules: FaultRules(rules) })
}

fn rule(key: &Text, text: &Text) -> Result<FaultRule, SpecError> {
    let name = key.value();
    let known = OPERATIONS.iter().find(|(known, _)| *known == name);
    let operation = known.ok_or_else(|| key.error(SpecFault::Operation(name)))?.1;
    let (text, count_max) = match text.split_once('#') {
        Some((text, count)) => (text, Some(parse_count(&count)?)),
        None => (text.clone(), None),
    };
    let (text, range) = match text.split_once('@') {
        Some((text, range)) => (text, Some(parse_range(&range)?)),
        None => (text, None),
    };
    Ok(FaultRule { operation, effect: parse_effect(&text)?, range, count_max })
}

fn parse_effect(text: &Text) -> Result<FaultEffect, SpecError> {
    let value = text.value();
    if value == "short" {
        return Ok(FaultEffect::Short);
    }
    if let Some((_, error)) = ERRORS.iter().find(|(name, _)| *name == value) {
        return Ok(FaultEffect::Error(*error));
    }
    parse_time(&value).map(FaultEffect::Delay).map_err(|_| text.error(SpecFault::Effect(value)))
}

fn parse_count(text: &Text) -> Result<u64, SpecError> {
    let count = text.value().parse().ok().filter(|&count| count > 0);
    count.ok_or_else(|| text.error(SpecFault::Count(text.value())))
}

fn parse_range(text: &Text) -> Result<ByteRange, SpecError> {
    let bad = || text.error(SpecFault::Range(text.value()));
    let (offset, len) = text.split_once('+').ok_or_else(bad)?;
    let offset = parse_size(&offset.value()).map_err(|_| bad())?;
    let len = parse_size(&len.value()).ok().filter(|&len| len > 0).ok_or_else(bad)?;
    Ok(ByteRange { offset, len })
}
