//! What a terminal shows, with its colours, as a page for the browser.

use std::fmt::Write as _;

/// The colours that `berth top` uses, on a dark ground.
const COLOURS: [(&str, &str); 3] = [("31", "#ff8078"), ("33", "#e0b040"), ("36", "#76b4ff")];

/// The address of a page that holds the screen.
pub(crate) fn page(screen: &str) -> String {
    let mut body = String::new();
    let mut style: Vec<String> = Vec::new();
    for (at, part) in screen.split("\u{1b}[").enumerate() {
        let text = if at == 0 {
            part
        } else {
            let (codes, text) = part.split_once('m').unwrap_or(("0", part));
            for code in codes.split(';') {
                match code {
                    "0" | "" => style.clear(),
                    "22" | "27" | "39" => style.retain(|known| !ends(code, known)),
                    _ => style.push(code.to_owned()),
                }
            }
            text
        };
        let _ = write!(body, "<span style=\"{}\">{}</span>", css(&style), escaped(text));
    }
    let html = format!(
        "<!doctype html><meta charset=utf-8><body style=\"margin:0;background:#0f1317;color:#e6eaf0\"><pre style=\"margin:12px 16px;font:13px/19px \
         'DejaVu Sans Mono',monospace\">{body}</pre>"
    );
    format!("data:text/html;charset=utf-8;base64,{}", encoded(html.as_bytes()))
}

/// Whether a code ends what another one began.
fn ends(code: &str, known: &str) -> bool {
    match code {
        "22" => known == "1" || known == "2",
        "27" => known == "7",
        _ => COLOURS.iter().any(|(colour, _)| *colour == known),
    }
}

fn css(style: &[String]) -> String {
    let has = |code: &str| style.iter().any(|known| known == code);
    let mut css = String::new();
    for (code, colour) in COLOURS {
        if has(code) {
            let _ = write!(css, "color:{colour};");
        }
    }
    if has("1") {
        css.push_str("font-weight:bold;");
    }
    if has("2") {
        css.push_str("color:#8f9bab;");
    }
    if has("7") {
        css.push_str("background:#2b3440;");
    }
    css
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn encoded(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
