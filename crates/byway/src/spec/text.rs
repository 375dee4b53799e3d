//! Text in which each character is either itself or a mark, after backslashes and quotes are resolved.

use super::{SpecError, SpecFault};

/// A part of a specification. Splitting keeps where each part came from.
#[derive(Clone, Debug)]
pub(super) struct Text {
    chars: Vec<Char>,
    /// Where it starts (or would, if it is empty), counted from 1.
    column: usize,
}

#[derive(Clone, Copy, Debug)]
struct Char {
    value: char,
    /// Behind a backslash or between quotes: never a mark.
    literal: bool,
    column: usize,
}

impl Text {
    pub(super) fn read(spec: &str) -> Result<Self, SpecError> {
        let mut chars = Vec::with_capacity(spec.len());
        let mut quoted_since = None;
        let mut rest = spec.chars().enumerate().map(|(index, value)| (index + 1, value));
        while let Some((column, value)) = rest.next() {
            match value {
                '"' => quoted_since = if quoted_since.is_some() { None } else { Some(column) },
                '\\' => {
                    let fault = SpecFault::Quote("the backslash at the end has nothing behind it; write two");
                    let (_, next) = rest.next().ok_or(SpecError { column, fault })?;
                    chars.push(Char { value: next, literal: true, column });
                }
                _ => chars.push(Char { value, literal: quoted_since.is_some(), column }),
            }
        }
        match quoted_since {
            Some(column) => {
                Err(SpecError { column, fault: SpecFault::Quote("this quote is not closed; add a \" or write \\\"") })
            }
            None => Ok(Self { chars, column: 1 }),
        }
    }

    pub(super) fn error(&self, fault: SpecFault) -> SpecError {
        SpecError { column: self.column, fault }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chars.is_empty()
    }

    /// The characters, whatever they were.
    pub(super) fn value(&self) -> String {
        self.chars.iter().map(|c| c.value).collect()
    }

    /// Parts between the marks `mark`; at least one.
    pub(super) fn split(&self, mark: char) -> Vec<Self> {
        let mut parts = vec![Self { chars: Vec::new(), column: self.column }];
        for &c in &self.chars {
            if c.value == mark && !c.literal {
                parts.push(Self { chars: Vec::new(), column: c.column + 1 });
            } else if let Some(part) = parts.last_mut() {
                part.chars.push(c);
            }
        }
        parts
    }

    /// Before and behind the first mark `mark`.
    pub(super) fn split_once(&self, mark: char) -> Option<(Self, Self)> {
        let at = self.chars.iter().position(|c| c.value == mark && !c.literal)?;
        let before = Self { chars: self.chars[..at].to_vec(), column: self.column };
        let behind = Self { chars: self.chars[at + 1..].to_vec(), column: self.chars[at].column + 1 };
        Some((before, behind))
    }

    /// Whether all of it is unquoted `a-z`, and there is some.
    pub(super) fn is_word(&self) -> bool {
        !self.is_empty() && self.chars.iter().all(|c| !c.literal && c.value.is_ascii_lowercase())
    }
}
