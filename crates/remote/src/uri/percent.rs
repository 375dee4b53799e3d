//! Percent-encoding in URIs (RFC 3986, 2.1). The crate percent-encoding passes a bad sequence through; here it is refused.

use std::fmt;

/// The bytes that a text stands for; `None` if a percent sign is without two hexadecimal digits.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte == b'%' {
            let (digits, tail) = rest.split_at_checked(2)?;
            bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
            rest = tail;
        } else {
            bytes.push(byte);
        }
    }
    Some(bytes)
}

/// Writes bytes with everything encoded that is not plain in a path or a query.
pub(super) fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte) {
            write!(f, "{}", char::from(byte))?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}
