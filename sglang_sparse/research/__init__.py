# SPDX-License-Identifier: Apache-2.0
"""Research: studies, and the training of the small reference model. No part of the wheel."""
