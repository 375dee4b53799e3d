//! The tokens of a Rust file with their lines, also those inside macro calls, which `syn` leaves
//! unparsed. Comments are not tokens and strings are single ones, so a word found here is code.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A token as the rules want to see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The identifier, or the punctuation or bracket character; empty for a literal.
    pub text: String,
    /// From 1.
    pub line: usize,
}

/// All tokens of a file in order, brackets included; none where it does not tokenise.
pub fn of(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    if let Ok(stream) = text.parse::<TokenStream>() {
        flatten(stream, &mut tokens);
    }
    tokens
}

/// The line of each place where these tokens stand one after the other.
pub fn find(tokens: &[Token], words: &[&str]) -> Vec<usize> {
    tokens
        .windows(words.len())
        .filter(|window| window.iter().zip(words).all(|(token, word)| token.text == *word))
        .map(|window| window[0].line)
        .collect()
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                tokens.push(Token { text: open.to_owned(), line });
                let end = group.span_close().end().line;
                flatten(group.stream(), tokens);
                tokens.push(Token { text: close.to_owned(), line: end });
            }
            TokenTree::Ident(word) => tokens.push(Token { text: word.to_string(), line }),
            TokenTree::Punct(mark) => tokens.push(Token { text: mark.as_char().to_string(), line }),
            TokenTree::Literal(_) => tokens.push(Token { text: String::new(), line }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_in_macros_are_seen_and_words_in_text_are_not() {
        let tokens = of("// word\nfn f() {\n    m!(word \"word\");\n}\n");
        assert_eq!(find(&tokens, &["word"]), [3]);
        assert_eq!(find(&tokens, &["m", "!", "(", "word"]), [3]);
    }
}
