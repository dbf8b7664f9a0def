//! Who may see the page: whoever has the link that was printed, in a browser that this page itself was loaded in.
//!
//! | attack | answer |
//! |---|---|
//! | another user of the machine | no token, no answer; the token is 256 random bits |
//! | a page of another site, which the browser also shows | `Origin` and `Sec-Fetch-Site` are checked, the cookie is same-site |
//! | a name of another site that leads to this address (DNS rebinding) | `Host` must be a name of the loopback device, with our port |
//! | names with markup in objects | the page builds elements and never parses text; the content security policy allows no inline script |
//! | a frame around the page | `frame-ancestors 'none'` |

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, COOKIE, HOST, LOCATION, ORIGIN, REFERRER_POLICY,
    SET_COOKIE, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};

/// Nothing but this page's own files and its own answers; no script or style in a document.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'";

/// What proves that a person was given the link.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// A new one, of 256 random bits.
    pub fn random() -> Self {
        use ring::rand::SecureRandom as _;
        let mut bytes = [0_u8; 32];
        ring::rand::SystemRandom::new().fill(&mut bytes).expect("the kernel has random numbers");
        Self(berth_core::hex(&bytes))
    }

    /// A token that was kept; `None` if the text is none.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_one = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_one.then(|| Self(text.to_owned()))
    }

    /// The text, for the link and for a file that only its owner may read.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Whether this is the token; the time that it takes tells nothing of how much of it is right.
    fn is(&self, given: &str) -> bool {
        Sha256::digest(given.as_bytes()) == Sha256::digest(self.0.as_bytes())
    }
}

/// What is checked for every request.
#[derive(Debug, Clone)]
pub(super) struct Gate {
    pub(super) token: Token,
    pub(super) address: SocketAddr,
}

impl Gate {
    /// Browsers keep cookies by host without the port: two pages of one machine need two names.
    fn cookie(&self) -> String {
        format!("berth-{}", self.address.port())
    }

    fn knows_host(&self, host: &str) -> bool {
        let port = self.address.port();
        let names = [
            format!("{}", self.address),
            format!("localhost:{port}"),
            format!("127.0.0.1:{port}"),
            format!("[::1]:{port}"),
        ];
        names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    /// Why a request is refused, if it is: first where it comes from, then who sends it.
    fn refuses(&self, method: &Method, headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
        let text =
            |value: Option<&HeaderValue>| value.and_then(|value| value.to_str().ok()).map(str::to_owned);
        let host = text(headers.get(HOST)).unwrap_or_default();
        if !self.knows_host(&host) {
            return Some((
                StatusCode::MISDIRECTED_REQUEST,
                "This page answers on the loopback address only, under the name in its link.",
            ));
        }
        let origin = text(headers.get(ORIGIN));
        if headers.contains_key(ORIGIN) && origin.as_deref() != Some(&format!("http://{host}")) {
            return Some((StatusCode::FORBIDDEN, "Another page may not use this one."));
        }
        let site = text(headers.get("sec-fetch-site")).unwrap_or_default();
        let navigates = text(headers.get("sec-fetch-mode")).as_deref() == Some("navigate");
        let reads = matches!(*method, Method::GET | Method::HEAD);
        if matches!(site.as_str(), "cross-site" | "same-site") && !(reads && navigates) {
            return Some((StatusCode::FORBIDDEN, "Another page may not use this one."));
        }
        if !reads {
            let json =
                text(headers.get(CONTENT_TYPE)).is_some_and(|kind| kind.starts_with("application/json"));
            if origin.is_none() || !json {
                return Some((StatusCode::FORBIDDEN, "Only this page itself may ask for a change."));
            }
        }
        None
    }

    fn is_let_in(&self, headers: &HeaderMap) -> bool {
        let name = self.cookie();
        let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut values =
            cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
        values.any(|(key, value)| key == name && self.token.is(value))
    }
}

/// The layer around everything that is served.
pub(super) async fn guard(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let mut response = answer(&gate, request, next).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    response
}

async fn answer(gate: &Gate, request: Request, next: Next) -> Response {
    if let Some((status, why)) = gate.refuses(request.method(), request.headers()) {
        return (status, why).into_response();
    }
    let given =
        request.uri().query().unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("token="));
    if request.uri().path() == "/" && given.is_some_and(|given| gate.token.is(given)) {
        let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict", gate.cookie(), gate.token.text());
        let made = Response::builder()
            .status(StatusCode::SEE_OTHER)
            .header(LOCATION, "/")
            .header(SET_COOKIE, cookie);
        return made
            .body(Body::empty())
            .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response());
    }
    if gate.is_let_in(request.headers()) {
        return next.run(request).await;
    }
    if request.uri().path() == "/" {
        let page = include_str!("assets/token.html");
        return (StatusCode::UNAUTHORIZED, [(CONTENT_TYPE, "text/html; charset=utf-8")], page)
            .into_response();
    }
    (StatusCode::UNAUTHORIZED, "Open the link that berth printed when it started: it has the token.")
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> Gate {
        Gate { token: Token::random(), address: "127.0.0.1:7070".parse().unwrap() }
    }

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        all.iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_str(value).unwrap()))
            .collect::<Vec<(axum::http::HeaderName, HeaderValue)>>()
            .into_iter()
            .collect()
    }

    #[test]
    fn a_request_must_come_from_the_page_itself() {
        let gate = gate();
        let own = [("host", "127.0.0.1:7070")];
        let json = ("content-type", "application/json");
        for (method, extra, refused) in [
            (Method::GET, vec![], false),
            (Method::GET, vec![("origin", "http://127.0.0.1:7070")], false),
            (Method::GET, vec![("origin", "http://evil.example")], true),
            (Method::GET, vec![("origin", "null")], true),
            (Method::GET, vec![("origin", "http://127.0.0.1:7071")], true),
            (Method::GET, vec![("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], true),
            (Method::GET, vec![("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors")], true),
            (Method::GET, vec![("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], false),
            (Method::POST, vec![json, ("origin", "http://127.0.0.1:7070")], false),
            (Method::POST, vec![json], true),
            (Method::POST, vec![json, ("origin", "http://evil.example")], true),
            (Method::POST, vec![("origin", "http://127.0.0.1:7070"), ("content-type", "text/plain")], true),
            (
                Method::POST,
                vec![
                    json,
                    ("origin", "http://127.0.0.1:7070"),
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                ],
                true,
            ),
        ] {
            let given: Vec<_> = own.iter().copied().chain(extra.clone()).collect();
            assert_eq!(gate.refuses(&method, &headers(&given)).is_some(), refused, "{method} {extra:?}");
        }
    }

    #[test]
    fn only_names_of_the_loopback_device_are_known() {
        let gate = gate();
        for (host, known) in [
            ("127.0.0.1:7070", true),
            ("localhost:7070", true),
            ("LOCALHOST:7070", true),
            ("[::1]:7070", true),
            ("127.0.0.1", false),
            ("127.0.0.1:7071", false),
            ("evil.example:7070", false),
            ("127.0.0.1:7070.evil.example", false),
            ("", false),
        ] {
            assert_eq!(gate.refuses(&Method::GET, &headers(&[("host", host)])).is_none(), known, "{host}");
        }
        assert!(gate.refuses(&Method::GET, &HeaderMap::new()).is_some());
    }

    #[test]
    fn the_cookie_is_the_token_under_the_name_of_the_port() {
        let gate = gate();
        let text = gate.token.text();
        for (cookie, let_in) in [
            (format!("berth-7070={text}"), true),
            (format!("a=b; berth-7070={text}; c=d"), true),
            (format!("berth-7071={text}"), false),
            (format!("berth-7070={}", &text[1..]), false),
            ("berth-7070=".to_owned(), false),
        ] {
            assert_eq!(gate.is_let_in(&headers(&[("cookie", &cookie)])), let_in, "{cookie}");
        }
        assert_eq!(Token::parse(&format!("{text}\n")), Some(gate.token.clone()));
        assert_eq!(Token::parse("short"), None);
        assert!(!format!("{gate:?}").contains(text));
    }
}
