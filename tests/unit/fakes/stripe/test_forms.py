"""How the stand-in reads form parameters."""

from __future__ import annotations

import pytest

from tests.fakes.stripe.errors import StripeError
from tests.fakes.stripe.forms import Params, decode, official_names


def read(encoded: str) -> Params:
    return Params(decode(encoded))


class TestDecoding:
    def test_brackets_nest_and_numbers_index(self) -> None:
        tree = decode("line_items[0][price_data][currency]=usd&line_items[1][quantity]=2&expand[]=a&expand[]=b")
        assert tree == {
            "line_items": {"0": {"price_data": {"currency": "usd"}}, "1": {"quantity": "2"}},
            "expand": {"0": "a", "1": "b"},
        }

    def test_a_name_that_is_both_a_value_and_an_object_is_refused(self) -> None:
        with pytest.raises(StripeError, match="both a value and an object"):
            decode("a=1&a[b]=2")

    def test_too_many_fields_are_refused(self) -> None:
        with pytest.raises(StripeError, match="could not be read"):
            decode("&".join(f"k{index}=1" for index in range(1_001)))


class TestReading:
    @pytest.mark.parametrize("value", ["1.5", "ten", "1e3", "١٢", "--1"])
    def test_what_is_no_integer_names_its_parameter(self, value: str) -> None:
        with pytest.raises(StripeError) as caught:
            read(f"amount={value}").integer("amount")
        assert caught.value.body["error"]["param"] == "amount"
        assert caught.value.body["error"]["code"] == "parameter_invalid_integer"
        assert not caught.value.saved

    def test_a_missing_parameter_is_named_with_its_path(self) -> None:
        with pytest.raises(StripeError) as caught:
            read("price_data[unit_amount]=5").inner("price_data").required_text("currency")
        assert caught.value.body["error"]["param"] == "price_data[currency]"

    def test_unknown_parameters_and_unmodelled_ones_are_told_apart(self) -> None:
        official = official_names("TransferCreateParams")
        with pytest.raises(StripeError, match="unknown parameter"):
            read("amuont=1").check(official, ["amount"])
        with pytest.raises(StripeError, match="does not model"):
            read("source_type=card").check(official, ["amount"])

    def test_the_clients_own_options_are_no_parameters(self) -> None:
        assert "idempotency_key" not in official_names("TransferCreateParams")
        assert "mode" in official_names("SessionCreateParams")


class TestMetadata:
    def test_an_empty_value_removes_a_key_and_an_empty_whole_removes_all(self) -> None:
        assert read("metadata[a]=&metadata[b]=2").metadata({"a": "1", "c": "3"}) == {"b": "2", "c": "3"}
        assert read("metadata=").metadata({"a": "1"}) == {}

    @pytest.mark.parametrize(
        "encoded",
        [f"metadata[{'k' * 41}]=1", f"metadata[k]={'v' * 501}", "&".join(f"metadata[k{n}]=1" for n in range(51))],
    )
    def test_its_bounds_are_stripes(self, encoded: str) -> None:
        with pytest.raises(StripeError):
            read(encoded).metadata()
